"""What a rank did in one step, read from the profiler: when it waited for others, when its stages were busy.

Times are nanoseconds from the step's start, which is a barrier: so ranks of several hosts compare, whatever
their clocks say.
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

from hpc_parallel.strategies.pipeline import BUSY
from hpc_parallel.torch_internals import profiler_events

STEP = "measured step"
WAIT = "wait for others"
BACKWARD = "backward pass"
WAITS = (WAIT, "_c10d_functional::wait_tensor")  # the second: DTensor's, and other functional collectives
ENGINE = "autograd::engine::evaluate_function"
PEER_TO_PEER = ("gloo:send", "gloo:recv")
COMMUNICATION = ("c10d::", "_c10d_functional::", "gloo:", "nccl:", "record_param_comms")
CHUNK = re.compile(rf"{BUSY} (\d+) (\w+)(?: (\d+))?")

Interval = tuple[int, int]  # start, end


@contextmanager
def marked_waits() -> Iterator[None]:
    """Meanwhile the profiler sees when a caller waits for a collective, and how long a backward pass takes,
    of which torch tells nothing."""
    with marked(Work, "wait", WAIT), marked(torch.autograd, "backward", BACKWARD):
        yield


@contextmanager
def marked(owner: Any, name: str, mark: str) -> Iterator[None]:
    """Meanwhile each call of `owner.name` is a range `mark` of the profiler's."""
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
    """One of the profiler's."""

    name: str
    start: int
    end: int
    thread: int = 1
    on_device: bool = False
    is_mark: bool = False  # a range that someone named, and no kernel


def events_of(profiled: profile) -> list[Event]:
    """All that was recorded on this rank."""
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


class Chunk(NamedTuple):
    """What a stage of a pipeline did from `start` to `end`; `kind` as of `strategies.pipeline.busy`."""

    start: int
    end: int
    stage: int
    kind: str
    microbatch: int | None


@dataclass(frozen=True)
class Timeline:
    """One step of one rank; intervals are in order and apart from each other."""

    length: int
    waiting: list[Interval]  # communication runs and nothing is computed
    stages: list[Interval]  # a pipeline's, busy with a microbatch
    computing: list[Interval]  # kernels run on the GPU, or operators on the host where there is none
    chunks: list[Chunk]  # of `stages`, by start; one may lie within another

    @classmethod
    def read(cls, events: Sequence[Event], *, on_gpu: bool) -> Timeline:
        """On a CPU the host's waits tell: between them it computes. On a GPU so do the kernels.

        gloo's own ranges would not do: under load they begin and end late, beside the computation.
        """
        (step,) = [event for event in events if event.name == STEP and not event.on_device]
        host = (event for event in events if event.thread == step.thread and not event.on_device)
        calls = [event for event in host if event is not step]
        kernels = [event for event in events if event.on_device and not event.is_mark]
        communicating = [event for event in kernels if event.name.startswith("nccl")]
        computing = [event for event in kernels if not event.name.startswith("nccl")]
        stages = [event for event in events if event.name.startswith(BUSY) and event.on_device == on_gpu]
        operators = [
            event
            for event in events
            if not (event.on_device or event.is_mark or event is step or event.name in WAITS)
            and not event.name.startswith((*COMMUNICATION, BUSY))
        ]
        waits = spans(call for call in calls if call.name in WAITS) + ends_of_backward(
            calls, collectives=[event for event in events if event.name.startswith("gloo:")]
        )

        def within(intervals: Iterable[Interval]) -> list[Interval]:
            cut = ((max(a, step.start) - step.start, min(b, step.end) - step.start) for a, b in intervals)
            return union((start, end) for start, end in cut if start < end)

        return cls(
            length=step.end - step.start,
            waiting=without(within([*waits, *spans(communicating)]), within(spans(computing))),
            stages=within(spans(stages)),
            computing=within(spans(computing if on_gpu else operators)),
            chunks=sorted(
                Chunk(event.start - step.start, event.end - step.start, *what)
                for event in stages
                if (what := chunk_of(event.name)) is not None
            ),
        )

    def ends_of_stages(self) -> tuple[float, float]:
        """When this rank's stages began and ended; (0, 0) where it has none."""
        return (self.stages[0][0], self.stages[-1][1]) if self.stages else (0, 0)

    def bubble(self, schedule: Interval | None) -> float:
        """The share of its pipeline's `schedule` in which this rank's stages have no work; 0 without one.

        Not a number where the profiler saw no stage.
        """
        if schedule is None:
            return 0.0
        return length(without([schedule], self.stages)) / (schedule[1] - schedule[0]) if self.stages else nan

    def exposed(self, schedule: Interval | None) -> int:
        """Nanoseconds of communication that no computation hides, the pipeline's bubble left out."""
        return length(without(self.waiting, self.idle(schedule)))

    def idle(self, schedule: Interval | None) -> list[Interval]:
        """Its pipeline's `schedule` goes on and this rank's stages have no work."""
        return without([schedule], self.stages) if schedule else []

    def parts(self, schedule: Interval | None) -> dict[str, int]:
        """Nanoseconds of the step by what they went to; together its length.

        `compute`: an operator or a kernel runs; `communication`: as `exposed`; `bubble`: as `idle`;
        `other`: the host's own work in between, and whatever else nothing was seen of.
        """
        idle = self.idle(schedule)
        parts = {
            "compute": length(without(without(self.computing, self.waiting), idle)),
            "communication": self.exposed(schedule),
            "bubble": length(idle),
        }
        return {**parts, "other": self.length - sum(parts.values())}


def chunk_of(name: str) -> tuple[int, str, int | None] | None:
    """Stage, kind and microbatch of a range that `strategies.pipeline.busy` marked; None of another."""
    found = CHUNK.fullmatch(name)
    if found is None:
        return None
    stage, kind, microbatch = found.groups()
    return int(stage), kind, None if microbatch is None else int(microbatch)


def ends_of_backward(calls: Sequence[Event], *, collectives: Sequence[Event]) -> list[Interval]:
    """DistributedDataParallel waits for its buckets inside the engine, one after the other, seen only as what
    it does not do: after the last node of a backward pass nothing is called while a collective runs."""
    running = union(spans(event for event in collectives if event.name not in PEER_TO_PEER))
    nodes = sorted((call.start, call.end) for call in calls if call.name.startswith(ENGINE))
    ends: list[Interval] = []
    for backward in (call for call in calls if call.name == BACKWARD):
        own = nodes[bisect_left(nodes, (backward.start, 0)) : bisect_left(nodes, (backward.end, 0))]
        if own:
            ends.append((max(end for _, end in own), backward.end))
    called = union(spans(call for call in calls if not call.is_mark))
    return without(without(union(ends), called), without(union(ends), running))


def spans(events: Iterable[Event]) -> list[Interval]:
    return [(event.start, event.end) for event in events]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def without(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """The parts of `first` outside `second`, both in order and apart."""
    left: list[Interval] = []
    index = 0
    for start, end in first:
        while index < len(second) and second[index][1] <= start:
            index += 1
        at = index
        while at < len(second) and second[at][0] < end:
            if start < second[at][0]:
                left.append((start, second[at][0]))
            start = max(start, second[at][1])
            at += 1
        if start < end:
            left.append((start, end))
    return left


def length(intervals: Iterable[Interval]) -> int:
    return sum(end - start for start, end in intervals)
