"""A few steps watched: the bytes between ranks, the time lost to communication, the pipeline's bubble.

All other steps run as if this were not here: nothing of the model, of torch or of the loop is replaced.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile, record_function

from hpc_parallel.profiling.timeline import STEP, Interval, Timeline, events_of, marked_waits
from hpc_parallel.profiling.traffic import NAMES, Traffic
from hpc_parallel.record.values import finite
from hpc_parallel.strategies import exchange
from hpc_parallel.strategies.mesh import axis_of

CHUNK_COLUMNS = ("start_s", "end_s", "stage", "kind", "microbatch")  # of `timeline.json`
WARM_UP = 2  # steps: after the first comes a validation, and then a pipeline learns its shapes again


class Measurement:
    """Counts bytes in the first step after the warm-up, and times the `steps` that follow it.

    Counting and timing make these steps slower. `leave_out` gets their seconds, so that no figure holds them.
    """

    def __init__(
        self, *, steps: int, mesh: DeviceMesh, device: torch.device, leave_out: Callable[[float], None]
    ) -> None:
        self._timed = range(WARM_UP + 2, WARM_UP + 2 + steps)
        self._counted = WARM_UP + 1 if steps else 0
        self._device = device
        self._leave_out = leave_out
        pipeline = axis_of(mesh, "pipeline")
        self._pipeline = dist.get_process_group_ranks(pipeline.get_group()) if pipeline is not None else []
        self._traffic: Traffic | None = None
        self._timelines: list[Timeline] = []
        self._loading_s: list[float] = []

    def watch(self, step: int) -> AbstractContextManager[None]:
        """What the 1-based `step` runs under."""
        if step == self._counted:
            return self._left_out(self._count())
        return self._left_out(self._time()) if step in self._timed else nullcontext()

    def loading(self, step: int) -> AbstractContextManager[None]:
        """What the 1-based `step`'s batch is fetched under."""
        return self._load() if step in self._timed else nullcontext()

    @contextmanager
    def _load(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._loading_s.append(time.perf_counter() - started)

    @contextmanager
    def _left_out(self, watched: AbstractContextManager[None]) -> Iterator[None]:
        self._synchronise()  # what was queued before is no part of it
        started = time.perf_counter()
        with watched:
            yield
        self._leave_out(time.perf_counter() - started)

    @contextmanager
    def _count(self) -> Iterator[None]:
        self._traffic = Traffic()
        with self._traffic:
            yield

    @contextmanager
    def _time(self) -> Iterator[None]:
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or it writes lines of its own into the rank's log
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        with marked_waits(), profile(activities=kinds) as profiled:
            dist.barrier()
            with record_function(STEP):
                yield
                self._synchronise()
        self._timelines.append(Timeline.read(events_of(profiled), on_gpu=self._on_gpu))

    @property
    def _on_gpu(self) -> bool:
        return self._device.type == "cuda"

    def _synchronise(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._device)

    def figures(self) -> dict[str, Any]:
        """The keys of `summary.json` that were measured, the same on all ranks, who ask together."""
        return self._bytes() | self._shares()

    def _bytes(self) -> dict[str, Any]:
        if self._traffic is None:
            return {}
        sent, received = self._traffic.sent, self._traffic.received
        here = [float(sent[kind]) for kind in NAMES]
        table = exchange.all_gather_numbers([*here, float(received.total())], device=self._device)
        by_kind = {kind: int(sum(column)) for kind, column in zip(NAMES, table, strict=False)}
        unknown = sorted(set().union(*exchange.all_gather(sorted(self._traffic.unknown))))
        if unknown:
            return _not_counted(unknown)
        return {
            "traffic_bytes": sum(by_kind.values()),
            "busiest_rank_traffic_bytes": int(max(map(sum, zip(*table, strict=True)))),
            "traffic": {kind: total for kind, total in by_kind.items() if total},
        }

    def _shares(self) -> dict[str, Any]:
        """Medians over the steps of means over the ranks; of the step's parts means, so that they add up."""
        if not self._timelines:
            return {}
        shares: list[float] = []
        parts: list[float] = []
        for timeline, schedule in zip(self._timelines, self._schedules(), strict=True):
            shares += [timeline.exposed(schedule) / timeline.length, timeline.bubble(schedule)]
            parts += timeline.parts(schedule).values()
        loading = [fmean(self._loading_s)]
        means = [
            fmean(column)
            for column in exchange.all_gather_numbers(shares + parts + loading, device=self._device)
        ]
        means, parts, loading = means[: len(shares)], means[len(shares) : -1], means[-1:]
        names = list(self._timelines[0].parts(None))
        return {
            "exposed_communication_share": finite(median(means[::2])),
            "bubble_share": finite(median(means[1::2])),
            "step_parts_s": {
                **{name: fmean(parts[at :: len(names)]) / 1e9 for at, name in enumerate(names)},
                "data": loading[0],
            },
        }

    def schedule_chart(self) -> dict[str, Any] | None:
        """What each stage of the first pipeline did when, in the last watched step; None without one.

        The content of `timeline.json`, the same on all ranks, who ask together.
        """
        mine: dict[str, Any] | None = None
        if self._timelines and 0 in self._pipeline:
            last = self._timelines[-1]
            mine = {
                "rank": dist.get_rank(),
                "length_s": last.length / 1e9,
                "chunks": [[start / 1e9, end / 1e9, *what] for start, end, *what in last.chunks],
                "waiting": [[start / 1e9, end / 1e9] for start, end in last.waiting],
            }
        ranks = [found for found in exchange.all_gather(mine) if found is not None]
        return {"columns": CHUNK_COLUMNS, "ranks": ranks} if ranks else None

    def _schedules(self) -> list[Interval | None]:
        """Of each step, from the first to the last work of any rank of this one's pipeline."""
        ends = [end for timeline in self._timelines for end in timeline.ends_of_stages()]
        everywhere = exchange.all_gather_numbers(
            ends, device=self._device
        )  # [step's first, its last, ...][rank]
        if not self._pipeline:
            return [None] * len(self._timelines)
        mine = [[column[rank] for rank in self._pipeline] for column in everywhere]
        return [(int(min(first)), int(max(last))) for first, last in zip(mine[::2], mine[1::2], strict=True)]


def _not_counted(unknown: list[str]) -> dict[str, Any]:
    """The step called collectives whose bytes are not known: then no total is right."""
    if dist.get_rank() == 0:
        names = ", ".join(unknown)
        print(
            f"WARNING: traffic is not counted: no rule for the bytes of {names}", file=sys.stderr, flush=True
        )
    return {"unknown_collectives": unknown}
