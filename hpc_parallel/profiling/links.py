"""Links between hosts: measured pair by pair, and judged.

Pairs of ranks exchange a message in both directions at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_parallel.start.start_times import synchronize
from hpc_parallel.strategies import exchange
from hpc_parallel.strategies.groups import backend_of

SLOW = 2.0  # times slower than the median link
MOST_TRIES = 3  # measurements of all links, while a link seems slow
REPEATS = 3

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


def link_rates(
    first_ranks: Sequence[int],
    *,
    rounds: Sequence[Sequence[Pair]],
    device: torch.device,
    size_bytes: int,
    is_late: Callable[[], bool] = lambda: False,
) -> dict[Pair, float]:
    """Pair of hosts -> bytes per second in each direction, both at the same time; a collective call.

    All pairs of a round exchange at the same time. While a link seems slow, all links are measured again. The
    fastest time of each link counts, because noise seldom slows the same link three times.

    first_ranks: the first rank of each host; rounds: all or some of `rounds`;
    is_late: whether to leave out the remaining rounds, a collective call.
    """
    rank = dist.get_rank()
    if backend_of(device.type) == "gloo":
        device = torch.device("cpu")  # gloo sends from host memory only
    send, receive = (torch.ones(size_bytes // 4, device=device) for _ in range(2))
    best: dict[Pair, float] = {}
    for _ in range(MOST_TRIES):
        for pairs in rounds:
            if best and is_late():
                return best
            peers = {first_ranks[a]: first_ranks[b] for a, b in pairs}
            peers |= {other: one for one, other in peers.items()}
            dist.barrier()
            own_s = 0.0
            if (peer := peers.get(rank)) is not None:
                own_s = fastest_s(partial(swap, send, receive, peer), device=device)
            times = exchange.all_gather(own_s)
            for pair in pairs:
                slowest_s = max(times[first_ranks[host]] for host in pair)
                best[pair] = max(best.get(pair, 0.0), send.nbytes / slowest_s)
        if not slow_hosts(best) and not slow_pairs(best):
            break
    return best


def swap(send: Tensor, receive: Tensor, peer: int) -> None:
    """Send to the peer and receive from it at the same time."""
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, send, peer), dist.P2POp(dist.irecv, receive, peer)]
    )
    for work in works:
        work.wait()


def fastest_s(run: Callable[[], object], *, device: torch.device) -> float:
    """The shortest of REPEATS times in seconds, after one run that connects the ranks."""
    times = []
    for _ in range(REPEATS + 1):
        synchronize(device)
        started = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times[1:])
