"""The times of two short operations at a start, a matrix product and a small all-reduce.

They show slow ranks, and the speeds of devices that differ (`strategy.shares=measured`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median, median_low

import torch
import torch.distributed as dist

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.layout.batch_plan import batch_of, shares_batch_problems
from hpc_parallel.layout.layout import Layout, servers
from hpc_parallel.layout.shares import MOST_RATIO
from hpc_parallel.machine.host_findings import SLOW
from hpc_parallel.problems import as_override, print_warning
from hpc_parallel.strategies import exchange

ROUNDS, ROUND_S = 3, 0.2  # of matrix products; the fastest round counts
MOST_TRIES = 3  # repeated while a rank seems slow: noise seldom slows the same rank three times
SIDES = {"cpu": 512, "cuda": 4096}
SUMMED_BYTES = 2**20
SUMS = 5
SHARES_ROUNDS = 11  # about two seconds, so that other work on a host does not decide the result


def matrix_times_s(device: torch.device) -> list[float]:
    """The seconds of one matrix product on each rank, by rank; a collective call."""
    fastest = math.inf
    times: list[float] = []
    for _ in range(MOST_TRIES):
        fastest = min(fastest, *product_times_s(device))
        (times,) = exchange.all_gather_numbers([fastest], device=torch.device("cpu"))
        if max(times) <= SLOW * median_low(times):
            break
    return times


def product_times_s(device: torch.device, *, rounds: int = ROUNDS) -> list[float]:
    """The seconds of one matrix product in each of some rounds."""
    side = SIDES[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    one, other = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
    one @ other  # loads the library
    times = []
    for _ in range(rounds):
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < ROUND_S:
            one @ other
            synchronize(device)
            count += 1
        times.append((time.perf_counter() - began) / count)
    return times


def all_reduce_times_s(device: torch.device) -> list[float]:
    """The seconds of one all-reduce of SUMMED_BYTES over all ranks, by rank: the fastest of SUMS.

    Empty for a single rank. A collective call.
    """
    if dist.get_world_size() == 1:
        return []
    array = torch.zeros(SUMMED_BYTES // 4, device=device)
    times = []
    for _ in range(SUMS + 1):  # the first one connects the ranks
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(array)
        synchronize(device)
        times.append(time.perf_counter() - began)
    (by_rank,) = exchange.all_gather_numbers([min(times[1:])], device=torch.device("cpu"))
    return by_rank


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measured_shares(config: RunConfig, layout: Layout, *, device: torch.device) -> list[float]:
    """Returns the speed of each part of the layout, for `strategy.shares=measured`; a collective call.

    All devices compute matrix products at the same time, so processes that share cores slow each other as
    they do in the training. Rank 0 prints the shares.
    """
    dist.barrier()
    time_s = median(product_times_s(device, rounds=SHARES_ROUNDS))
    (times_s,) = exchange.all_gather_numbers([time_s], device=torch.device("cpu"))
    shares = shares_of(times_s[servers(config.strategy) :], layout)
    if dist.get_rank() == 0:
        measured = replace(config, strategy=replace(config.strategy, shares=shares))
        print(f"{as_override('strategy.shares', list(shares))} was measured", flush=True)
        for problem in shares_batch_problems(measured, batch_of(measured, layout)):
            print_warning(problem)
    return shares


def shares_of(times_s: Sequence[float], layout: Layout) -> list[float]:
    """The speed of each replica, or of each rank of a pipeline, relative to the fastest (two decimals).

    times_s: the times of the same work on each rank of the layout. A part is as fast as its slowest rank.
    """
    slowest: dict[int, float] = {}
    for rank, time_s in enumerate(times_s):
        part = layout.coordinates(rank)["pipeline"] if layout.pipeline > 1 else layout.replica(rank)
        slowest[part] = max(slowest.get(part, 0.0), time_s)
    fastest_s = min(slowest.values())
    return [max(round(fastest_s / slowest[part], 2), 1 / MOST_RATIO) for part in sorted(slowest)]
