"""Each product of two axes beside its parts: what a step costs on two cores.

    python -m tests.benchmarks.peers products

Each figure is of four processes at the same time, each with as many samples and operations: one device as
four copies, an axis of degree 2 as two copies of two processes, and a product as one copy of four. Copies
exchange nothing. The cost of a layout is what its step takes beyond that of one device. A product should cost
at most 1.1 of the sum of its parts:

    step(a x b) - step(one) <= 1.1 x ((step(a) - step(one)) + (step(b) - step(one)))

Times are of a process: on a core, which decide and have no waiting, and by the clock, which need an idle
machine. A round measures every layout once, and the figures are medians of rounds.
"""

from __future__ import annotations

import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import chain, combinations
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.training.observers import Progress
from hpc_parallel.worker.session import TaskContext, read_config
from hpc_parallel.worker.train import train
from tests.workers import Workers

PROCESSES, SAMPLES = 4, 4  # SAMPLES: of each process in a step
STEPS, WARM_UP, ROUNDS = 9, 3, 5
MOST = 1.1
CLOCKS = {"on a core": time.process_time, "by the clock": time.perf_counter}
AXES = ("replicate", "shard", "pipeline", "context", "tensor", "expert")
LAYOUTS = [axes for count in range(3) for axes in combinations(AXES, count)]
WORDS = (
    "strategy=hybrid", "model=moe_tiny", "model.layers=4", "model.dim=256", "model.heads=8",
    "model.kv_heads=8", "model.ffn_dim=384", "data=text", "data.sequence_length=256",
    "data.max_bytes=1000000", f"training.steps={STEPS}", "training.validate_every=null",
    "training.checkpoint_every=null", "training.measure_steps=0", "training.microbatch_size=2",
)  # fmt: skip
Seconds = dict[str, float]  # of a step, for each process, by CLOCKS


def measure(peers: str, *, rounds: int = ROUNDS) -> dict[str, Any]:
    """One row, a table. Met if each product costs at most `MOST` of its parts on a core."""
    tables: list[dict[tuple[str, ...], Seconds]] = []
    loads = [os.getloadavg()[0]]
    for _ in range(rounds):
        tables.append({axes: step_s(axes) for axes in LAYOUTS})
        loads.append(os.getloadavg()[0])
    lines, met = [f"{rounds} rounds at a load of {min(loads):.0f} to {max(loads):.0f}"], True
    for a, b in combinations(AXES, 2):
        figures = []
        for clock in CLOCKS:
            one = median(table[()][clock] for table in tables)
            cost = median(table[a, b][clock] - table[()][clock] for table in tables)
            parts = median(sum(table[part,][clock] - table[()][clock] for part in (a, b)) for table in tables)
            met &= clock != "on a core" or cost <= MOST * parts
            figures += [f"{clock}: one device {one:.3f} s, product {cost:+.3f}, its parts {parts:+.3f}"]
        lines.append(f"  {a + ' x ' + b:20} {'; '.join(figures)}")
    return {"loads": loads, "met": met, "text": "\n".join(lines)}


def step_s(axes: tuple[str, ...]) -> Seconds:
    """The means of a step's seconds over four processes and the steps after the warm-up."""
    ranks = 2 ** len(axes)
    degrees = [f"strategy.{axis}={1 + (axis in axes)}" for axis in AXES]
    sizes = f"nodes={ranks}", f"training.global_batch_size={SAMPLES * ranks}"
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        names = [str(folder / str(copy)) for copy in range(PROCESSES // ranks)]
        pools = [stack.enter_context(closing(Workers(Path(name)))) for name in names]
        # One after another: Hydra has a global state.
        runs = [str(pool.prepare(*WORDS, *sizes, *degrees).folder.path) for pool in pools]
        threads = stack.enter_context(ThreadPoolExecutor(len(pools)))
        rows = list(chain(*threads.map(lambda pool, run: pool.run(ranks, rank_s, run), pools, runs)))
    return {clock: fmean(row[clock] for row in rows) for clock in CLOCKS}


@dataclass
class Marks(Progress):
    times: list[Seconds] = field(default_factory=list)

    def mark(self, phase: str, step: int) -> None:
        """`data` is the first mark of a step."""
        super().mark(phase, step)
        if phase == "data":
            self.times.append({name: clock() for name, clock in CLOCKS.items()})


def rank_s(run_folder: str) -> Seconds:
    folder = RunFolder(Path(run_folder))
    config, values = read_config(folder.config)
    marks = Marks()
    train(TaskContext(config, values, folder, torch.device("cpu"), environment={}, progress=marks))
    first, *_, last = marks.times[WARM_UP:]
    return {clock: (last[clock] - first[clock]) / (len(marks.times) - 1 - WARM_UP) for clock in CLOCKS}
