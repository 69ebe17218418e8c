"""Ours and a peer in the same two processes, step by step in turns: ours, theirs, theirs, ours, and so on.

Ours is the whole loop of the trainer, from one fetch of a batch to the next: the batch, the step, the metrics
line, the agreement about a stop. A step counts with the time of its slowest rank.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.training.observers import Progress
from hpc_parallel.worker.session import TaskContext, read_config
from hpc_parallel.worker.train import train
from tests.benchmarks.peers.ratio import LEAST_PAIRS, blocks_s, ratio_of
from tests.benchmarks.peers.recipe import recipe_of

BLOCK = 10  # steps; the default training.log_every, so that each block of ours has one line of metrics
WARM_UP = 20  # steps of each side that don't count: connections, buckets, measured steps, compilation
CLOSE_ENOUGH = 0.03  # half of the interval: then the contest ends
LOSS_TOLERANCE = 1e-3  # relative, in float32 over the steps of a contest


CLOCKS: Mapping[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
"""`cpu`: the processor time of a rank with its threads, which other guests of the machine do not lengthen."""


class EnoughError(Exception):
    """Ends the training of ours on all ranks at the same step."""


@dataclass
class Turns(Progress):
    """Runs the peer's steps between those of ours, and takes the times of both."""

    peer: Callable[[int], Tensor] = lambda index: torch.zeros(())
    limit_s: float = 60.0
    most_steps: int = 1000
    clock: Callable[[], float] = time.perf_counter
    ours_s: list[float] = field(default_factory=list)
    theirs_s: list[float] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    _began: float = 0.0
    _first: float = field(default_factory=time.monotonic)

    def mark(self, phase: str, step: int) -> None:
        """`data` is the first mark of a step, on every rank."""
        now = self.clock()
        super().mark(phase, step)
        if phase != "data":
            return
        if step > 1:
            self.ours_s.append(now - self._began)
        if step % 2 == 0:
            self._run_peer()
            self._run_peer()
        if step > WARM_UP and step % BLOCK == 1 and self._enough():
            raise EnoughError
        dist.barrier()
        self._began = self.clock()

    def _run_peer(self) -> None:
        dist.barrier()
        began = self.clock()
        loss = self.peer(len(self.theirs_s))
        self.theirs_s.append(self.clock() - began)
        self.losses.append(loss)

    def _enough(self) -> bool:
        """Rank 0 decides for all: the interval is narrow, or time or batches are over."""
        steps = len(self.theirs_s)
        if steps + 2 * BLOCK > self.most_steps or time.monotonic() - self._first > self.limit_s:
            enough = True
        else:
            ours, theirs = (
                blocks_s(times[WARM_UP:steps], steps=BLOCK) for times in (self.ours_s, self.theirs_s)
            )
            pairs = min(len(ours), len(theirs))
            enough = pairs >= LEAST_PAIRS and ratio_of(ours[:pairs], theirs[:pairs]).spread < CLOSE_ENOUGH
        flag = torch.tensor([float(enough)])
        dist.broadcast(flag, src=0)
        return bool(flag)


def contest(
    run_folder: str, module: str, peers: str, *, limit_s: float, most_steps: int, clock: str
) -> dict[str, Any]:
    """On each rank: train the prepared run beside the peer `module`; the times of both and their losses.

    clock: of CLOCKS.
    """
    sys.path.append(peers)
    folder = RunFolder(Path(run_folder))
    config, values = read_config(folder.config)
    recipe = recipe_of(config, steps=most_steps)
    with patch.dict(os.environ, rank_variables()), suppress(EnoughError):
        file, _, function = module.partition(":")
        peer = getattr(import_module(f"tests.benchmarks.peers.{file}"), function or "build")(recipe)
        turns = Turns(peer=peer, limit_s=limit_s, most_steps=most_steps, clock=CLOCKS[clock])
        train(TaskContext(config, values, folder, torch.device("cpu"), environment={}, progress=turns))
    slowest = [slowest_s(times) for times in (turns.ours_s, turns.theirs_s)]
    mean = torch.stack(turns.losses).double()
    dist.all_reduce(mean)
    lines = (
        [json.loads(line) for line in folder.metrics.read_text().splitlines()] if dist.get_rank() == 0 else []
    )
    return {
        "ours_s": slowest[0],
        "theirs_s": slowest[1],
        "ours_losses": {line["step"]: line["loss"] for line in lines},
        "theirs_losses": dict(enumerate((mean / dist.get_world_size()).tolist(), start=1)),
    }


def slowest_s(times_s: list[float]) -> list[float]:
    """Each step with the time of its slowest rank."""
    times = torch.tensor(times_s, dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return times.tolist()


def largest_difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> float:
    """The largest relative difference of two loss curves at the steps that both have."""
    common = ours.keys() & theirs.keys()
    return max(abs(ours[step] - theirs[step]) / abs(theirs[step]) for step in common)


def rank_variables() -> dict[str, str]:
    """What torchrun sets: Fabric and accelerate read them, although the process group exists."""
    return {
        "RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank()),
        "WORLD_SIZE": str(dist.get_world_size()), "LOCAL_WORLD_SIZE": str(dist.get_world_size()),
        "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "bench", "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
