"""Reads from the profiler when a rank waited for other ranks in a step, and when its stages were busy.

Times are nanoseconds from the start of the step. The step starts at a barrier, so the times of ranks on
different hosts can be compared even if their clocks differ.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import nan
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.distributed import Work
from torch.profiler import profile, record_function

from hpc_parallel.record.task_files import StageWork
from hpc_parallel.strategies.pipeline import BUSY
from hpc_parallel.strategies.ranges import Action
from hpc_parallel.torch_internals import profiler_events

STEP = "measured step"
WAIT = "wait for others"
BACKWARD = "backward pass"
WAITS = (WAIT, "_c10d_functional::wait_tensor")  # the second: in functional collectives, as DTensor's
ENGINE = "autograd::engine::evaluate_function"
PEER_TO_PEER = ("gloo:send", "gloo:recv")
COMMUNICATION = ("c10d::", "_c10d_functional::", "gloo:", "nccl:", "record_param_comms")
CHUNK = re.compile(rf"{BUSY} (\d+) (\w+)(?: (\d+))?")

Interval = tuple[int, int]  # start, end


@contextmanager
def marked_waits() -> Iterator[None]:
    """While active, waits for collectives and backward passes are ranges in the profile.

    torch itself records neither.
    """
    with marked(Work, "wait", WAIT), marked(torch.autograd, "backward", BACKWARD):
        yield


@contextmanager
def marked(owner: Any, name: str, mark: str) -> Iterator[None]:
    """While active, each call of `owner.name` is a range `mark` in the profile."""
    function = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        with record_function(mark):
            return function(*arguments, **options)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, function)


class Event(NamedTuple):
    """An event of the profiler; times in nanoseconds."""

    name: str
    start: int
    end: int
    thread: int = 1
    on_device: bool = False
    is_mark: bool = False  # a range named by `record_function`, not a kernel


def events_of(profiled: profile) -> list[Event]:
    return [
        Event(
            name=event.name(),
            start=event.start_ns(),
            end=event.end_ns(),
            thread=event.start_thread_id(),
            on_device=event.device_type() != DeviceType.CPU,
            is_mark=event.is_user_annotation(),
        )
        for event in profiler_events(profiled)
    ]


@dataclass(frozen=True)
class Timeline:
    """One step of one rank. Intervals are sorted and do not overlap."""

    length: int
    waiting: list[Interval]  # communication runs and no computation does
    stages: list[Interval]  # a pipeline stage is busy with a microbatch
    computing: list[Interval]  # kernels run on the GPU; without a GPU, operators on the host
    chunks: list[StageWork]  # of `stages`, sorted by start; one may lie within another

    @classmethod
    def read(cls, events: Sequence[Event], *, on_gpu: bool, actions: Sequence[Action] = ()) -> Timeline:
        """Read one step from `events`.

        On a CPU, waiting time is the time of the host's wait calls. On a GPU, NCCL kernels count too.
        gloo's own ranges are not usable: under load they begin and end late, during the computation.

        actions: the actions of a pipeline on a GPU, timed from the start of the step. The profiler's ranges
        on a GPU are not usable: they miss the kernels of a backward pass (strategies/ranges.py).
        """
        (step,) = [event for event in events if event.name == STEP and not event.on_device]
        host = (event for event in events if event.thread == step.thread and not event.on_device)
        calls = [event for event in host if event is not step]
        kernels = [event for event in events if event.on_device and not event.is_mark]
        communicating = [event for event in kernels if event.name.startswith("nccl")]
        computing = [event for event in kernels if not event.name.startswith("nccl")]
        if on_gpu:
            stages = [Event(name, step.start + start, step.start + end) for name, start, end in actions]
        else:
            stages = [event for event in events if event.name.startswith(BUSY) and not event.on_device]
        operators = [
            event
            for event in events
            if not (event.on_device or event.is_mark or event is step or event.name in WAITS)
            and not event.name.startswith((*COMMUNICATION, BUSY))
        ]
        waits = spans(call for call in calls if call.name in WAITS) + ends_of_backward(
            calls, collectives=[event for event in events if event.name.startswith("gloo:")]
        )
        return cls(
            length=step.end - step.start,
            waiting=without(within([*waits, *spans(communicating)], step), within(spans(computing), step)),
            stages=within(spans(stages), step),
            computing=within(spans(computing if on_gpu else operators), step),
            chunks=sorted(
                StageWork((event.start - step.start) / 1e9, (event.end - step.start) / 1e9, *labels)
                for event in stages
                if (labels := chunk_of(event.name)) is not None
            ),
        )

    def ends_of_stages(self) -> tuple[float, float]:
        """When this rank's stages began and ended; (0, 0) if it has none."""
        return (self.stages[0][0], self.stages[-1][1]) if self.stages else (0, 0)

    def bubble(self, schedule: Interval | None) -> float:
        """Returns the share of the pipeline's `schedule` in which this rank's stages are idle.

        0 without a pipeline; NaN if the profile has no stage.
        """
        if schedule is None:
            return 0.0
        return length(without([schedule], self.stages)) / (schedule[1] - schedule[0]) if self.stages else nan

    def exposed(self, schedule: Interval | None) -> int:
        """Returns nanoseconds of communication that do not overlap with computation, without the bubble."""
        return length(without(self.waiting, self.idle(schedule)))

    def idle(self, schedule: Interval | None) -> list[Interval]:
        """The parts of the pipeline's `schedule` in which this rank's stages have no work."""
        return without([schedule], self.stages) if schedule else []

    def parts(self, schedule: Interval | None) -> dict[str, int]:
        """Returns the step's nanoseconds by use; they add up to its length.

        `compute`: an operator or a kernel runs; `communication`: as `exposed`; `bubble`: as `idle`;
        `other`: the host's work in between, and all time in which no event was recorded.
        """
        idle = self.idle(schedule)
        parts = {
            "compute": length(without(without(self.computing, self.waiting), idle)),
            "communication": self.exposed(schedule),
            "bubble": length(idle),
        }
        return {**parts, "other": self.length - sum(parts.values())}


def chunk_of(name: str) -> tuple[int, str, int | None] | None:
    """Stage, kind and microbatch of a range that `strategies.pipeline.busy` marked; None for other ranges."""
    match = CHUNK.fullmatch(name)
    if match is None:
        return None
    stage, kind, microbatch = match.groups()
    return int(stage), kind, None if microbatch is None else int(microbatch)


def ends_of_backward(calls: Sequence[Event], *, collectives: Sequence[Event]) -> list[Interval]:
    """Find the waits of DistributedDataParallel for its buckets, at the end of each backward pass.

    DistributedDataParallel waits inside the autograd engine, and no event records these waits. They are the
    times after the last node of a backward pass, while a collective runs and nothing is called.
    """
    running = union(spans(event for event in collectives if event.name not in PEER_TO_PEER))
    nodes = sorted((call.start, call.end) for call in calls if call.name.startswith(ENGINE))
    ends: list[Interval] = []
    for backward in (call for call in calls if call.name == BACKWARD):
        inside = nodes[bisect_left(nodes, (backward.start, 0)) : bisect_left(nodes, (backward.end, 0))]
        if inside:
            ends.append((max(end for _, end in inside), backward.end))
    called = union(spans(call for call in calls if not call.is_mark))
    return without(without(union(ends), called), without(union(ends), running))


def spans(events: Iterable[Event]) -> list[Interval]:
    return [(event.start, event.end) for event in events]


def within(intervals: Iterable[Interval], step: Event) -> list[Interval]:
    """The parts of the intervals inside a step, from its start."""
    clipped = ((max(a, step.start) - step.start, min(b, step.end) - step.start) for a, b in intervals)
    return union((start, end) for start, end in clipped if start < end)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def without(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """The parts of `first` outside `second`. In both, intervals are sorted and do not overlap."""
    remaining: list[Interval] = []
    index = 0
    for start, end in first:
        while index < len(second) and second[index][1] <= start:
            index += 1
        overlap = index
        while overlap < len(second) and second[overlap][0] < end:
            if start < second[overlap][0]:
                remaining.append((start, second[overlap][0]))
            start = max(start, second[overlap][1])
            overlap += 1
        if start < end:
            remaining.append((start, end))
    return remaining


def length(intervals: Iterable[Interval]) -> int:
    return sum(end - start for start, end in intervals)
