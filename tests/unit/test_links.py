"""The order in which pairs of hosts are measured, and which host or link is found slow."""

from __future__ import annotations

import math
from itertools import combinations
from random import Random

import pytest

from hpc_parallel.profiling.links import rounds, slow_hosts, slow_pairs


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
