"""A training loop of a user's own, for the table of faults: float64 over gloo, with a file for its state."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_parallel import job_context

WIDTH, SAMPLES, RATE = 16, 8, 0.01
SAVING_S = 0.3


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SAMPLES, WIDTH, generator=generator, dtype=torch.float64)


def sums(weights: Tensor, inputs: Tensor) -> Tensor:
    """The sums of the gradient and of the loss over samples that should all give 1."""
    error = inputs @ weights - 1
    return torch.cat([2 * inputs.T @ error, error.square().sum().reshape(1)])


def alone(steps: int) -> tuple[list[float], list[float]]:
    """The losses and the last weights on one device."""
    weights, losses = torch.zeros(WIDTH, dtype=torch.float64), []
    for step in range(1, steps + 1):
        total = sums(weights, batch(step)) / SAMPLES
        losses.append(total[-1].item())
        weights -= RATE * total[:-1]
    return losses, weights.tolist()


def main(saved: Path, home: Path, steps: int, every: int, pause_s: float) -> None:
    """Train on all ranks. In `home`, the file `crawl` slows each step, and `hold` keeps a start waiting."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    weights, first = torch.zeros(WIDTH, dtype=torch.float64), 0
    while (home / "hold").exists():
        time.sleep(0.05)
    if "--resume" in sys.argv:
        state = json.loads(saved.read_text())
        weights, first = torch.tensor(state["weights"], dtype=torch.float64), state["step"]
    for step in range(first + 1, steps + 1):
        total = sums(weights, batch(step)[rank::ranks])
        dist.all_reduce(total)
        weights -= RATE * total[:-1] / SAMPLES
        time.sleep(pause_s * (4 if (home / "crawl").exists() else 1))
        job_context.log(step=step, loss=total[-1] / SAMPLES)
        stops = job_context.stop_requested(step)
        if rank == 0 and (stops or step == steps or step % every == 0):
            half = saved.with_name(f".step-{step}")
            half.write_text(json.dumps({"step": step, "weights": weights.tolist()}))
            time.sleep(SAVING_S)
            half.rename(saved)
        if stops:
            break
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # threads of gloo may abort an ordinary exit (docs/own-script.md)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))
