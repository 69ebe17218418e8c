"""Finds slow ranks from the times of the same steps on all ranks, and hosts with a slow network.

A slow link makes every rank wait, so the times of a step can't show which host has the slow link. They show
when to measure the links: when even the rank that waits least waits long, and longer than before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median, median_low
from typing import Any

from hpc_parallel.profiling.links import Pair, rounds, slow_hosts, usual_rate
from hpc_parallel.record.recorded_slow_ranks import MOST_ACCUSATIONS
from hpc_parallel.record.values import finite

SLOW = 1.1  # as a multiple of the median
SAMPLES = 3  # timed steps in a row: fewer may be noise
LEAST_S = 1e-3  # shorter differences are not reported
COMPUTE, DATA, NETWORK = "compute", "data", "network"  # causes
LARGE = 0.5  # waits as a multiple of a rank's own time, if no earlier step is known
LEAST = 0.1  # smaller waits do not start a check
GROWTH = 2.0  # larger multiples of the waits of earlier steps start a check
MOST_CHECKS = 4  # checks of the links in one training
MOST_ROUNDS = 5  # links of each host in one check
KEPT = 10  # waits of earlier steps
MESSAGE_BYTES = 2**20

Measure = Callable[[Sequence[int], Sequence[Sequence[Pair]]], Mapping[Pair, float]]


@dataclass(frozen=True)
class RankTime:
    """Seconds of one step on one rank: own work, waiting for other ranks, and fetching the batch."""

    rank: int
    host: str
    role: int
    busy_s: float
    wait_s: float
    data_s: float

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


class SlowNetwork:
    """Decides from times that all ranks have gathered, so all ranks make the same decision."""

    def __init__(self, measure: Measure) -> None:
        """measure: the rates of links, given the first rank of each host and the rounds of pairs."""
        self._measure = measure
        self._checks = 0
        self._calm: list[float] = []  # waits of steps with sound links
        self._suspects: set[int] = set()  # first ranks of the hosts of the last check
        self._named: list[SlowRank] = []

    def find_slow(self, times: Sequence[RankTime]) -> list[SlowRank]:
        """The hosts whose links were slow in two checks in a row, by their first ranks; a collective call.

        The hosts stay named while all ranks wait long. The list is empty for two hosts: their link can't show
        which of them is slow.
        """
        hosts: dict[str, int] = {}
        for time in times:
            hosts.setdefault(time.host, time.rank)
        if len(hosts) < 3:
            return []
        waits = least_waits(times)
        if waits <= self._limit:
            self._calm = [*self._calm, waits][-KEPT:]
            self._suspects, self._named = set(), []
        elif not self._named and self._checks < MOST_CHECKS:
            self._check(hosts, waits=waits)
        return self._named

    @property
    def _limit(self) -> float:
        return max(LEAST, GROWTH * median(self._calm)) if self._calm else LARGE

    def _check(self, hosts: Mapping[str, int], *, waits: float) -> None:
        self._checks += 1
        names, first_ranks = list(hosts), list(hosts.values())
        rates = self._measure(first_ranks, rounds(len(hosts))[:MOST_ROUNDS])
        slow = slow_hosts(rates)
        if not slow:
            self._calm, self._suspects = [waits], set()  # this training waits this long with sound links
            return
        usual = usual_rate(rates)
        usual_s = MESSAGE_BYTES / usual
        self._named = [
            SlowRank(first_ranks[host], names[host], NETWORK, usual / rate, MESSAGE_BYTES / rate, usual_s)
            for host, rate in slow.items()
            if first_ranks[host] in self._suspects
        ]
        self._suspects = {first_ranks[host] for host in slow}


def least_waits(times: Sequence[RankTime]) -> float:
    """The waits of the rank that waits least, as a multiple of its own time. A slow rank waits little."""
    return min((time.wait_s / time.own_s for time in times if time.own_s > 0), default=0.0)
