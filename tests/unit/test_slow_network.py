"""When and in which order the links of a training are measured, and which host or link is found slow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from random import Random

import pytest

from hpc_parallel.profiling.links import Pair, rounds, slow_hosts, slow_pairs
from hpc_parallel.profiling.slow_ranks import MOST_CHECKS, MOST_ROUNDS, RankTime, SlowNetwork, least_waits

GIGABYTE = 1e9


def step(*waits_ms: float, per_host: int = 2) -> list[RankTime]:
    """A timed step of ranks that work 100 ms each and wait that long."""
    return [
        RankTime(rank, f"n{rank // per_host}", 0, 0.09, wait / 1e3, 0.01)
        for rank, wait in enumerate(waits_ms)
    ]


class Links:
    """Links of 1 GB/s; those of the host `slow` carry a tenth. Counts how often they are measured."""

    def __init__(self, slow: int | None = None) -> None:
        self.slow = slow
        self.checks: list[Sequence[int]] = []
        self.rounds: Sequence[Sequence[Pair]] = []

    def __call__(self, first_ranks: Sequence[int], pairs: Sequence[Sequence[Pair]]) -> Mapping[Pair, float]:
        self.checks.append(first_ranks)
        self.rounds = pairs
        return {pair: GIGABYTE * (0.1 if self.slow in pair else 1.0) for round_ in pairs for pair in round_}


CALM, LONG = step(*[5.0] * 8), step(*[60.0] * 8)


@pytest.mark.parametrize(
    ("steps", "slow", "named", "checks"),
    [
        ([LONG] * 6, 3, [[], [(6, "n3")], [(6, "n3")], [(6, "n3")], [(6, "n3")], [(6, "n3")]], 2),
        ([CALM, LONG, LONG, CALM], 0, [[], [], [(0, "n0")], []], 2),
        ([CALM] * 6, 3, [[]] * 6, 0),  # nobody waits
        ([LONG] * 6, None, [[]] * 6, 1),  # a training with much communication, and sound links
        ([step(*[100.0] * 7, 1.0)] * 6, 3, [[]] * 6, 0),  # all wait for one slow rank
        ([step(*[60.0] * 4)] * 6, 1, [[]] * 6, 0),  # two hosts: whose link is it?
        ([step(*[30.0] * 8), LONG, LONG], 3, [[]] * 3, 0),  # as twice before, which is not more than twice
        ([step(*[25.0] * 8), LONG, LONG], 3, [[], [], [(6, "n3")]], 2),
        ([step(*[0.5] * 8), step(*[8.0] * 8)], 3, [[]] * 2, 0),  # much more, and still little
    ],
)
def test_which_host_is_named(
    steps: list[list[RankTime]], slow: int | None, named: list[list[tuple[int, str]]], checks: int
) -> None:
    links = Links(slow)
    network = SlowNetwork(links)
    slow_hosts = [[(host.rank, host.host) for host in network.find_slow(times)] for times in steps]
    assert slow_hosts == named
    assert len(links.checks) == checks
    assert links.checks[:1] in ([], [[0, 2, 4, 6]])  # the first rank of each host


def test_links_are_measured_a_few_times_only() -> None:
    """Each check accuses another host, so none is confirmed."""
    links = Links()
    network = SlowNetwork(links)
    for slow in (0, 1, 2, 3, 0, 1, 2, 3):
        links.slow = slow
        assert network.find_slow(LONG) == []
    assert len(links.checks) == MOST_CHECKS


@pytest.mark.parametrize(("hosts", "expected"), [(3, 3), (4, 3), (64, MOST_ROUNDS)])
def test_each_host_measures_a_few_links(hosts: int, expected: int) -> None:
    links = Links(slow=hosts - 1)
    network = SlowNetwork(links)
    times = step(*[60.0] * hosts, per_host=1)
    assert network.find_slow(times) == []
    assert links.rounds == rounds(hosts)[:expected]
    (slow,) = network.find_slow(times)
    assert (slow.rank, slow.host, slow.factor) == (hosts - 1, f"n{hosts - 1}", pytest.approx(10))
    subject = f"rank {hosts - 1} on n{hosts - 1}"
    assert str(slow) == f"{subject} is slow: network takes 10.00 x (10.5 ms for 1 MiB, and 1.0 elsewhere)"


def test_the_waits_of_the_rank_that_waits_least() -> None:
    assert least_waits(step(50, 20, 80)) == pytest.approx(0.2)
    assert least_waits([RankTime(0, "n0", -1, 0.0, 1.0, 0.0)]) == 0.0


@pytest.mark.parametrize("hosts", [1, 2, 3, 4, 7, 8, 33])
def test_each_pair_is_measured_once_and_no_host_twice_at_a_time(hosts: int) -> None:
    schedule = rounds(hosts)
    assert sorted(pair for pairs in schedule for pair in pairs) == list(combinations(range(hosts), 2))
    assert all(len({host for pair in pairs for host in pair}) == 2 * len(pairs) for pairs in schedule)
    assert len(schedule) <= hosts  # the fewest rounds: hosts - 1, or hosts if that is odd


def rates(hosts: int, *, seed: int = 0) -> dict[tuple[int, int], float]:
    """Healthy links with the noise of real ones."""
    noise = Random(seed).uniform
    return {pair: 1e9 * noise(0.8, 1.2) for pair in combinations(range(hosts), 2)}


@pytest.mark.parametrize("hosts", [1, 2, 3, 8, 32])
def test_nobody_is_accused_for_noise(hosts: int) -> None:
    for seed in range(20):
        assert slow_hosts(rates(hosts, seed=seed)) == {}
        assert slow_pairs(rates(hosts, seed=seed)) == {}


@pytest.mark.parametrize("hosts", [3, 4, 8, 32])
def test_a_slow_card_slows_all_links_of_its_host(hosts: int) -> None:
    measured = {pair: rate / (10 if 1 in pair else 1) for pair, rate in rates(hosts).items()}
    assert list(slow_hosts(measured)) == [1]
    assert math.isclose(slow_hosts(measured)[1], 1e8, rel_tol=0.25)
    assert slow_pairs(measured) == {}


@pytest.mark.parametrize("hosts", [4, 8, 32])
def test_a_slow_cable_accuses_the_pair(hosts: int) -> None:
    measured = rates(hosts)
    measured[1, 3] /= 10
    assert slow_hosts(measured) == {}
    assert list(slow_pairs(measured)) == [(1, 3)]
