"""`strategy.shares=measured`: time every device at the start of a training."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import torch
import torch.distributed as dist

from hpc_parallel.config.checks.layout_checks import MOST_RATIO, shares_batch_problems
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.layout.batch_plan import batch_of
from hpc_parallel.layout.layout import Layout, servers
from hpc_parallel.layout.shares import MEASURED
from hpc_parallel.problems import spell
from hpc_parallel.start.start_times import product_times_s
from hpc_parallel.strategies import exchange

ROUNDS = 11  # about two seconds, so that other work on a host does not decide the result


def with_measured_shares(config: RunConfig, layout: Layout, *, device: torch.device) -> RunConfig:
    """Replace `strategy.shares=measured` by the speed of each part of the layout; a collective call.

    All devices compute matrix products at the same time, so processes that share cores slow each other as
    they do in the training. Rank 0 prints the shares.
    """
    if config.strategy.shares != MEASURED:
        return config
    dist.barrier()
    time_s = median(product_times_s(device, rounds=ROUNDS))
    (times_s,) = exchange.all_gather_numbers([time_s], device=torch.device("cpu"))
    shares = shares_of(times_s[servers(config.strategy) :], layout)
    measured = replace(config, strategy=replace(config.strategy, shares=shares))
    if dist.get_rank() == 0:
        print(f"strategy.shares={spell(shares)} was measured", flush=True)
        for problem in shares_batch_problems(measured, batch_of(measured, layout)):
            print(f"WARNING: {problem}", file=sys.stderr, flush=True)
    return measured


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
