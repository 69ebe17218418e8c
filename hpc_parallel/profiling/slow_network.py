"""Finds hosts with a slow network: measures the links when all ranks begin to wait long.

A slow link makes every rank wait, so the times of a step can't show which host has the slow link. They show
when to measure the links: when even the rank that waits least waits long, and longer than before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median

from hpc_parallel.profiling.links import Pair, rounds, slow_hosts, usual_rate
from hpc_parallel.profiling.slow_ranks import NETWORK, RankTime, SlowRank

LARGE = 0.5  # waits as a multiple of a rank's own time, if no earlier step is known
LEAST = 0.1  # smaller waits do not start a check
GROWTH = 2.0  # larger multiples of the waits of earlier steps start a check
MOST_CHECKS = 4  # checks of the links in one training
MOST_ROUNDS = 5  # links of each host in one check
KEPT = 10  # waits of earlier steps
MESSAGE_BYTES = 2**20

Measure = Callable[[Sequence[int], Sequence[Sequence[Pair]]], Mapping[Pair, float]]


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
            self._note_calm(waits)
        elif not self._named and self._checks < MOST_CHECKS:
            self._check(hosts, waits=waits)
        return self._named

    @property
    def _limit(self) -> float:
        return max(LEAST, GROWTH * median(self._calm)) if self._calm else LARGE

    def _note_calm(self, waits: float) -> None:
        self._calm = [*self._calm, waits][-KEPT:]
        self._suspects, self._named = set(), []

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
