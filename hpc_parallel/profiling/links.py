"""Links between hosts, measured pair by pair: the order of the pairs, and which of them are too slow."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

SLOW = 2.0  # times slower than the median link

Pair = tuple[int, int]
Rates = Mapping[Pair, float]  # (lower host, higher host) -> bytes per second in each direction


def rounds(hosts: int) -> list[list[Pair]]:
    """Every pair once; the pairs of a round have no host in common (the circle method)."""
    seats: list[int | None] = [*range(hosts), *([None] * (hosts % 2))]
    result = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        facing = zip(seats[:half], reversed(seats[half:]), strict=True)
        result.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return result if hosts > 1 else []


def slow_hosts(rates: Rates) -> dict[int, float]:
    """Host -> median rate of its links, for hosts whose links are slow as a whole; none for two hosts."""
    hosts = sorted({host for pair in rates for host in pair})
    if len(hosts) < 3:
        return {}
    host_rates = {host: median(rate for pair, rate in rates.items() if host in pair) for host in hosts}
    usual = usual_rate(rates)
    return {host: rate for host, rate in host_rates.items() if rate * SLOW < usual}


def slow_pairs(rates: Rates) -> dict[Pair, float]:
    """The slow links between hosts that are not slow as a whole."""
    hosts = slow_hosts(rates)
    rest = {pair: rate for pair, rate in rates.items() if not hosts.keys() & set(pair)}
    if not rest:
        return {}
    usual = usual_rate(rest)
    return {pair: rate for pair, rate in rest.items() if rate * SLOW < usual}


def usual_rate(rates: Rates) -> float:
    """The median over hosts of each host's fastest link.

    With one slow host of three, two of the three links are slow, so the median of all links would be slow.
    """
    hosts = {host for pair in rates for host in pair}
    return median(max(rate for pair, rate in rates.items() if host in pair) for host in hosts)
