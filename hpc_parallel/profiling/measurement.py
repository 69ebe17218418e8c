"""Measures bytes between ranks, exposed communication and the pipeline's bubble, in a few steps.

All other steps run without measurement: nothing in the model, in torch or in the loop stays replaced.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile, record_function

from hpc_parallel.failure.left_out import left_out, optional
from hpc_parallel.layout.step_facts import UNMEASURED
from hpc_parallel.problems import print_warning
from hpc_parallel.profiling.timeline import STEP, Interval, Timeline, events_of, marked_waits
from hpc_parallel.profiling.traffic import NAMES, Traffic
from hpc_parallel.record.task_files import RankTimeline, StepTimeline
from hpc_parallel.record.typed import build
from hpc_parallel.record.values import finite
from hpc_parallel.start.start_times import synchronize
from hpc_parallel.strategies import exchange
from hpc_parallel.strategies.mesh import axis_of
from hpc_parallel.strategies.ranges import Action, ActionTimes, recorded_actions

TIMES = "the times of a step are"


class Measurement:
    """Counts bytes in the first step after the warm-up, and times the `steps` that follow it.

    Counting and timing make these steps slower, so no other metric includes them.
    """

    def __init__(
        self, *, steps: int, mesh: DeviceMesh, device: torch.device, leave_out: Callable[[float], None]
    ) -> None:
        """`leave_out` is called with the seconds of each measured step."""
        self.on = steps > 0
        self._timed = range(UNMEASURED + 1, UNMEASURED + 1 + steps)
        self._counted = UNMEASURED if steps else 0
        self._device = device
        self._leave_out = leave_out
        pipeline = axis_of(mesh, "pipeline")
        self._pipeline = dist.get_process_group_ranks(pipeline.get_group()) if pipeline is not None else []
        self._traffic: Traffic | None = None
        self._timelines: list[Timeline | None] = []
        self._loading_s: list[float] = []
        self.last_step_s = 0.0  # of the last measured step

    @property
    def steps(self) -> range:
        """The steps that are counted or timed."""
        return range(self._counted, self._timed.stop) if self._timed else range(0)

    def watch(self, step: int) -> AbstractContextManager[None]:
        """Returns the context in which to run the 1-based `step`."""
        if step == self._counted:
            self._traffic = Traffic()
            return self._measured(self._traffic)
        if step in self._timed:
            return self._measured(timed_step(self._device, into=self._timelines))
        return nullcontext()

    def loading(self, step: int) -> AbstractContextManager[None]:
        """Returns the context in which to fetch the batch of the 1-based `step`."""
        return self._load() if step in self._timed else nullcontext()

    @contextmanager
    def _load(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._loading_s.append(time.perf_counter() - started)

    @contextmanager
    def _measured(self, context: AbstractContextManager[Any]) -> Iterator[None]:
        synchronize(self._device)  # excludes work that was queued before
        started = time.perf_counter()
        with context:
            yield
        self.last_step_s = time.perf_counter() - started
        self._leave_out(self.last_step_s)

    def figures(self) -> dict[str, Any]:
        """Returns the measured keys of `summary.json`, the same on all ranks. All ranks call it together."""
        return self._bytes() | self._shares()

    def _bytes(self) -> dict[str, Any]:
        if self._traffic is None:
            return {}
        sent, received = self._traffic.sent, self._traffic.received
        sent_by_kind = [float(sent[kind]) for kind in NAMES]
        table = exchange.all_gather_numbers([*sent_by_kind, float(received.total())], device=self._device)
        by_kind = {kind: int(sum(column)) for kind, column in zip(NAMES, table, strict=False)}
        unknown = sorted(set().union(*exchange.all_gather(sorted(self._traffic.unknown))))
        if unknown:  # no total would be correct
            if dist.get_rank() == 0:
                print_warning(f"traffic is not counted: no rule for the bytes of {', '.join(unknown)}")
            return {"unknown_collectives": unknown}
        return {
            "traffic_bytes": sum(by_kind.values()),
            "busiest_rank_traffic_bytes": int(max(map(sum, zip(*table, strict=True)))),
            "traffic": {kind: total for kind, total in by_kind.items() if total},
        }

    def _shares(self) -> dict[str, Any]:
        """Means over ranks. Shares are medians over steps; parts of a step are means, so that they add up."""
        timelines = self._read_timelines()
        if not timelines:
            return {}
        shares: list[float] = []
        parts: list[float] = []
        for timeline, schedule in zip(timelines, self._schedules(timelines), strict=True):
            shares += [timeline.exposed(schedule) / timeline.length, timeline.bubble(schedule)]
            parts += timeline.parts(schedule).values()
        loading = [fmean(self._loading_s)]
        by_rank = exchange.all_gather_numbers(shares + parts + loading, device=self._device)
        means = [fmean(values) for values in by_rank]
        shares, parts, loading = means[: len(shares)], means[len(shares) : -1], means[-1:]
        names = list(timelines[0].parts(None))
        return {
            "exposed_communication_share": finite(median(shares[::2])),
            "bubble_share": finite(median(shares[1::2])),
            "step_parts_s": {
                **{name: fmean(parts[index :: len(names)]) / 1e9 for index, name in enumerate(names)},
                "data": loading[0],
            },
        }

    def schedule_chart(self) -> StepTimeline | None:
        """Returns the content of `timeline.json`: the work of the first pipeline in the last timed step.

        Returns the same on all ranks, which must call it together. None without a pipeline or a timed step.
        """
        local: RankTimeline | None = None
        timelines = self._read_timelines()
        if timelines and 0 in self._pipeline:
            last = timelines[-1]
            local = RankTimeline(
                rank=dist.get_rank(),
                length_s=last.length / 1e9,
                chunks=tuple(last.chunks),
                waiting=tuple((start / 1e9, end / 1e9) for start, end in last.waiting),
            )
        values = exchange.all_gather(None if local is None else vars(local))
        ranks = tuple(rank for value in values if (rank := build(RankTimeline, value)) is not None)
        return StepTimeline(ranks) if ranks else None

    def _read_timelines(self) -> list[Timeline]:
        """The timed steps; empty if a step of any rank could not be read. A collective call."""
        timelines = [timeline for timeline in self._timelines if timeline is not None]
        missing = float(len(self._timelines) - len(timelines))
        (by_rank,) = exchange.all_gather_numbers([missing], device=self._device)
        return [] if any(by_rank) else timelines

    def _schedules(self, timelines: Sequence[Timeline]) -> list[Interval | None]:
        """For each timed step, the time from the first to the last work of this rank's pipeline."""
        ends = [end for timeline in timelines for end in timeline.ends_of_stages()]
        # [2 * step: first work, 2 * step + 1: last work][rank]
        ends_by_rank = exchange.all_gather_numbers(ends, device=self._device)
        if not self._pipeline:
            return [None] * len(timelines)
        ends_of_pipeline = [[values[rank] for rank in self._pipeline] for values in ends_by_rank]
        begins, finishes = ends_of_pipeline[::2], ends_of_pipeline[1::2]
        return [(int(min(begin)), int(max(finish))) for begin, finish in zip(begins, finishes, strict=True)]


@contextmanager
def timed_step(device: torch.device, *, into: list[Timeline | None]) -> Iterator[None]:
    """Profile the step that runs inside and add its timeline; all ranks call it together.

    Adds None if the profiler fails on this rank.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise Kineto writes to the rank's log
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    actions: list[Action] = []
    with marked_waits(), optional(profile(activities=activities), what=TIMES) as profiled:
        dist.barrier()
        with record_function(STEP), device_actions(device) as times:
            yield
            if times is not None:
                torch.cuda.synchronize(device)
                with left_out(TIMES):
                    actions = times.read()
    timeline = None
    if profiled is not None:
        with left_out(TIMES):
            timeline = Timeline.read(events_of(profiled), on_gpu=on_gpu, actions=actions)
    into.append(timeline)


def device_actions(device: torch.device) -> AbstractContextManager[ActionTimes | None]:
    """The context in which a GPU records when actions run; on a CPU the profiler does it."""
    if device.type != "cuda":
        return nullcontext()
    return recorded_actions(partial(torch.Event, device, enable_timing=True))
