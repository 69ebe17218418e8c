"""Finds ranks that are slower than others, and the cause, from the times of the same steps on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median_low
from typing import Any

from hpc_parallel.record.recorded_slow_ranks import MOST_ACCUSATIONS
from hpc_parallel.record.values import finite

SLOW = 1.1  # as a multiple of the median
SAMPLES = 3  # timed steps in a row: fewer may be noise
LEAST_S = 1e-3  # shorter differences are not reported
COMPUTE, DATA, NETWORK = "compute", "data", "network"  # causes


@dataclass(frozen=True)
class RankTime:
    """Seconds of one step on one rank: own work, waiting for other ranks, and fetching the batch."""

    rank: int
    host: str
    role: int
    busy_s: float
    wait_s: float
    data_s: float

    def as_record(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def own_s(self) -> float:
        return self.busy_s + self.data_s


@dataclass(frozen=True)
class SlowRank:
    """factor: own time as a multiple of the median of the same role.

    If the cause is NETWORK, `rank` is the first rank of its host. The times are then those of 1 MiB over the
    host's links and over other links.
    """

    rank: int
    host: str
    cause: str
    factor: float
    own_s: float
    median_s: float

    def as_record(self) -> dict[str, Any]:
        return asdict(self) | {"factor": finite(self.factor), "line": str(self)}

    def __str__(self) -> str:
        what = " for 1 MiB" * (self.cause == NETWORK)
        times = f"{self.own_s * 1e3:.1f} ms{what}, and {self.median_s * 1e3:.1f} elsewhere"
        subject = f"rank {self.rank} on {self.host} is slow"
        return f"{subject}: {self.cause} takes {self.factor:.2f} x ({times})"


def slow_ranks(samples: Sequence[Sequence[RankTime]]) -> list[SlowRank]:
    """The ranks that were slow in each of the last SAMPLES timed steps; the slowest first.

    Ranks that wait are not slow: only a rank's own time counts. A role with one rank has no comparison.
    """
    if len(samples) < SAMPLES:
        return []
    by_step = [{slow.rank: slow for slow in _slow(times)} for times in samples[-SAMPLES:]]
    ranks = set.intersection(*(set(slow) for slow in by_step))
    return sorted((by_step[-1][rank] for rank in ranks), key=lambda slow: -slow.factor)


def _slow(times: Sequence[RankTime]) -> list[SlowRank]:
    slow = []
    for role in sorted({time.role for time in times}):
        peers = [time for time in times if time.role == role]
        usual_s = median_low(time.own_s for time in peers)
        usual_data_s = median_low(time.data_s for time in peers)
        for time in peers:
            extra_s = time.own_s - usual_s
            if time.own_s <= SLOW * usual_s or extra_s < LEAST_S:
                continue
            cause = DATA if time.data_s - usual_data_s > extra_s / 2 else COMPUTE
            own_s, median_s = (time.data_s, usual_data_s) if cause == DATA else (time.own_s, usual_s)
            factor = own_s / median_s if median_s else float("inf")
            slow.append(SlowRank(time.rank, time.host, cause, factor, own_s, median_s))
    return slow


class Accusations:
    """The slow ranks of earlier starts of the run, and those of this start."""

    def __init__(self, earlier: Sequence[Mapping[str, Any]], *, steps_done: int) -> None:
        """steps_done: the steps of earlier starts."""
        self._steps_done = steps_done
        self._records = {_key(record): dict(record) for record in earlier}

    def add(self, slow: Sequence[SlowRank], *, step: int) -> None:
        """Add the ranks that were slow in the 1-based `step` of this start. Their newest times are kept."""
        step += self._steps_done
        for rank in slow:
            record = rank.as_record()
            key = _key(record)
            if key not in self._records and len(self._records) >= MOST_ACCUSATIONS:
                continue
            first_step = self._records.get(key, {}).get("first_step", step)
            self._records[key] = record | {"first_step": first_step, "last_step": step}

    def as_records(self) -> list[dict[str, Any]]:
        return list(self._records.values())


def _key(record: Mapping[str, Any]) -> tuple[int, str, str]:
    return record["rank"], record["host"], record["cause"]
