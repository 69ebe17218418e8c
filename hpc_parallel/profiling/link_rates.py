"""Measures links between hosts: pairs of ranks exchange a message in both directions at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_parallel.profiling.links import Pair, slow_hosts, slow_pairs
from hpc_parallel.start.start_times import synchronize
from hpc_parallel.strategies import exchange
from hpc_parallel.strategies.groups import backend_of

MOST_TRIES = 3  # measurements of all links, while a link seems slow
REPEATS = 3


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

    first_ranks: the first rank of each host; rounds: all or some rounds of `links.rounds`;
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
