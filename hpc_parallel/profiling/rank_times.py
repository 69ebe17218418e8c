"""Times the parts of a step on every rank from time to time, and names ranks that stay slower than others.

Timing makes a step longer. The next step is timed when this extra time is less than half a per cent of the
time since the last timed step, or since the start.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hpc_parallel.failure.left_out import left_out
from hpc_parallel.problems import print_warning
from hpc_parallel.profiling.links import Pair, link_rates
from hpc_parallel.profiling.measurement import timed_step
from hpc_parallel.profiling.slow_ranks import (
    MESSAGE_BYTES,
    SAMPLES,
    Accusations,
    RankTime,
    SlowNetwork,
    SlowRank,
    slow_ranks,
)
from hpc_parallel.profiling.timeline import Timeline, length
from hpc_parallel.strategies import exchange

FIRST_STEP = 20  # the earliest timed step since the start
LEAST_STEPS = 20  # at least this many from one timed step to the next
COST = 0.005  # extra time of the timed steps, as a share of the time of all steps
KEPT = 100  # timed steps in the record
MOST_RECORDS = 8_000  # entries (a rank in a step) in the file: `read_json` takes files up to 8 MiB


@dataclass(kw_only=True)
class RankTimes:
    """The timed steps of a training. All ranks time the same steps.

    on: whether any step is timed. role: ranks with the same role have the same work (a stage). profiled: the
    steps that another profiler watches. expected_s: returns the expected seconds of a timed step, before the
    first one is timed. leave_out: called with the seconds of each timed step. write: called by rank 0 with
    the record.
    """

    on: bool
    host: str
    role: int
    device: torch.device
    profiled: Sequence[range]
    expected_s: Callable[[], float]
    leave_out: Callable[[float], None]
    device_state: Callable[[], dict[str, Any]]
    accusations: Accusations
    write: Callable[[dict[str, Any]], None]

    def __post_init__(self) -> None:
        self._first, self._next = FIRST_STEP if self.on else 0, 0
        self._before_s = self._data_s = self._began_s = 0.0
        self._usual_s = math.inf  # the shortest step since the last timed step
        self._samples: list[dict[str, Any]] = []
        self._times: list[list[RankTime]] = []
        self._network = SlowNetwork(self._link_rates)
        self.slow: list[SlowRank] = []  # when they were last timed; the same on all ranks
        self._named: set[tuple[int, str]] = set()

    def loading(self, step: int) -> AbstractContextManager[None]:
        """The context in which to fetch the batch of the 1-based `step` since the start."""
        if step == self._first:
            self._next = self._paid(0, took_s=self.expected_s(), earliest=step)
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

    def _link_rates(self, first_ranks: Sequence[int], rounds: Sequence[Sequence[Pair]]) -> dict[Pair, float]:
        return link_rates(first_ranks, rounds=rounds, device=self.device, size_bytes=MESSAGE_BYTES)

    @contextmanager
    def _load(self) -> Iterator[None]:
        self._began_s = time.perf_counter()
        yield
        self._data_s = time.perf_counter() - self._began_s

    @contextmanager
    def _time(self, step: int) -> Iterator[None]:
        timelines: list[Timeline | None] = []
        with timed_step(self.device, into=timelines):
            yield
        self._add(step, timelines[0])
        took_s = time.perf_counter() - self._began_s
        self.leave_out(took_s)
        self._next = self._paid(step, took_s=took_s, earliest=step + LEAST_STEPS)
        self._before_s, self._usual_s = 0.0, math.inf

    def _paid(self, last: int, *, took_s: float, earliest: int) -> int:
        """The next step to time, late enough after step `last` to respect COST. All ranks get the same."""
        extra = exchange.all_gather_numbers([took_s / self._usual_s - 1], device=torch.device("cpu"))[0]
        return self._free(max(earliest, last + math.ceil(max(extra) / COST)))

    def _free(self, step: int) -> int:
        """The step, or the first one after it that no other profiler watches."""
        while profiled := next((steps for steps in self.profiled if step in steps), None):
            step = profiled.stop
        return step

    def _add(self, step: int, timeline: Timeline | None) -> None:
        ranks = exchange.all_gather(None if timeline is None else self._record(timeline))
        if None in ranks:
            return
        self._times = [*self._times, [RankTime(**rank["times"]) for rank in ranks]][-SAMPLES:]
        self.slow = [*slow_ranks(self._times), *self._network.find_slow(self._times[-1])]
        record = {"step": step, "ranks": [rank["times"] | rank["device"] for rank in ranks]}
        kept = max(1, min(KEPT, MOST_RECORDS // len(ranks)))
        self._samples = [*self._samples, record][-kept:]
        if dist.get_rank() == 0:
            for slow_rank in self.slow:  # each rank and cause is named once
                if (slow_rank.rank, slow_rank.cause) not in self._named:
                    self._named.add((slow_rank.rank, slow_rank.cause))
                    print_warning(slow_rank)
            self.accusations.add(self.slow, step=step)
            slow = [slow_rank.as_record() for slow_rank in self.slow]
            accused = self.accusations.as_records()
            with left_out("the times of the ranks are"):
                self.write({"samples": self._samples, "slow": slow, "accused": accused})

    def _record(self, timeline: Timeline) -> dict[str, Any]:
        wait_s = length(timeline.waiting) / 1e9
        busy_s = timeline.length / 1e9 - wait_s
        times = RankTime(dist.get_rank(), self.host, self.role, busy_s, wait_s, self._data_s)
        state: dict[str, Any] = {}
        with left_out("the state of this device is"):
            state = self.device_state()
        return {"times": vars(times), "device": state}
