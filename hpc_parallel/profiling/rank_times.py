"""Times the parts of one step on every rank now and then, and names a rank that stays slower than the others.

A timed step takes longer than others. The next one comes when this extra time is less than half a per cent of
the steps in between.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from hpc_parallel.profiling.measurement import timed_step
from hpc_parallel.profiling.slow_ranks import SAMPLES, RankTime, SlowRank, slow_ranks
from hpc_parallel.profiling.timeline import Timeline, length
from hpc_parallel.strategies import exchange

FIRST_STEP = 20  # since the start
LEAST_STEPS = 20  # from one timed step to the next
COST = 0.005  # of the time of all steps
KEPT = 100  # timed steps in the record


class RankTimes:
    """The timed steps of a training; the same steps on all ranks."""

    def __init__(
        self,
        *,
        on: bool,
        host: str,
        role: int,
        device: torch.device,
        taken: Sequence[range],
        leave_out: Callable[[float], None],
        device_state: Callable[[], dict[str, Any]],
        write: Callable[[dict[str, Any]], None],
    ) -> None:
        """on: whether any step is timed; role: ranks with the same role have the same work (a stage).

        taken: steps that another profiler watches. `leave_out` is called with the seconds of each timed step;
        `write`, on rank 0, with the record.
        """
        self._host, self._role, self._device, self._taken = host, role, device, taken
        self._leave_out, self._device_state, self._write = leave_out, device_state, write
        self._next = self._free(FIRST_STEP) if on else 0
        self._before_s = self._data_s = self._began_s = 0.0
        self._usual_s = math.inf  # the shortest step since the last timed one
        self._samples: list[dict[str, Any]] = []
        self._times: list[list[RankTime]] = []
        self._named: set[tuple[int, str]] = set()

    def loading(self, step: int) -> AbstractContextManager[None]:
        """The context in which to fetch the batch of the 1-based `step` since the start."""
        return self._load() if step == self._next else nullcontext()

    def watch(self, step: int) -> AbstractContextManager[None]:
        """The context in which to run the step; all ranks call it together."""
        if step == self._next:
            return self._time(step)
        now = time.perf_counter()
        if self._before_s:
            self._usual_s = min(self._usual_s, now - self._before_s)
        self._before_s = now
        return nullcontext()

    def slow(self) -> list[SlowRank]:
        """The ranks that were slow when they were last timed; the same on all ranks."""
        return slow_ranks(self._times)

    @contextmanager
    def _load(self) -> Iterator[None]:
        self._began_s = time.perf_counter()
        yield
        self._data_s = time.perf_counter() - self._began_s

    @contextmanager
    def _time(self, step: int) -> Iterator[None]:
        timelines: list[Timeline] = []
        with timed_step(self._device, into=timelines):
            yield
        self._add(step, timelines[0])
        took_s = time.perf_counter() - self._began_s
        self._leave_out(took_s)
        extra = exchange.all_gather_numbers([took_s / self._usual_s - 1], device=torch.device("cpu"))[0]
        self._next = self._free(step + max(LEAST_STEPS, math.ceil(max(extra) / COST)))
        self._before_s, self._usual_s = 0.0, math.inf

    def _free(self, step: int) -> int:
        """The step, or the first one after it that no other profiler watches."""
        while taken := next((steps for steps in self._taken if step in steps), None):
            step = taken.stop
        return step

    def _add(self, step: int, timeline: Timeline) -> None:
        wait_s = length(timeline.waiting) / 1e9
        busy_s = timeline.length / 1e9 - wait_s
        own = RankTime(dist.get_rank(), self._host, self._role, busy_s, wait_s, self._data_s)
        ranks = exchange.all_gather({"times": own.as_record(), "device": self._device_state()})
        self._times = [*self._times, [RankTime(**rank["times"]) for rank in ranks]][-SAMPLES:]
        record = {"step": step, "ranks": [rank["times"] | rank["device"] for rank in ranks]}
        self._samples = [*self._samples, record][-KEPT:]
        if dist.get_rank() == 0:
            slow = self.slow()
            self._warn(slow)
            self._write({"samples": self._samples, "slow": [each.as_record() for each in slow]})

    def _warn(self, slow: Sequence[SlowRank]) -> None:
        """Name each rank and cause once."""
        for each in slow:
            if (each.rank, each.cause) not in self._named:
                self._named.add((each.rank, each.cause))
                print(f"WARNING: {each}", file=sys.stderr, flush=True)
