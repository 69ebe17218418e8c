"""The times of two short operations, a matrix product and a small all-reduce, which show slow ranks."""

from __future__ import annotations

import math
import time
from statistics import median_low

import torch
import torch.distributed as dist

from hpc_parallel.machine.host_findings import SLOW
from hpc_parallel.strategies import exchange

ROUNDS, ROUND_S = 3, 0.2  # of matrix products; the fastest round counts
MOST_TRIES = 3  # repeated while a rank seems slow: noise seldom slows the same rank three times
SIDES = {"cpu": 512, "cuda": 4096}
SUMMED_BYTES = 2**20
SUMS = 5


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
    """Wait until the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
