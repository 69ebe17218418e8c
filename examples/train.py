"""A script of one's own: DistributedDataParallel, a checkpoint, and three lines for its job.

Under torchrun alone, `job_context` does nothing and its `checkpoint_folder` is None.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from springs import Regressor, Springs
from torch.nn.parallel import DistributedDataParallel

from hpc_parallel import job_context

BATCH = 64


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")  # "nccl" on GPUs
    torch.manual_seed(0)
    model = DistributedDataParallel(Regressor(width=32, depth=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    checkpoint = (job_context.checkpoint_folder or Path()) / "last.pt"
    first = restore(checkpoint, model, optimizer)
    data, mine = Springs(1000), range(dist.get_rank(), BATCH, dist.get_world_size())
    for step in range(first, arguments.steps + 1):
        samples = [data[(step * BATCH + row) % len(data)] for row in mine]
        inputs, targets = map(torch.stack, zip(*samples, strict=True))
        loss = (model(inputs) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss)  # of all ranks' rows
        job_context.log(step=step, loss=loss / dist.get_world_size())
        stops = job_context.stop_requested(step)
        if stops or step == arguments.steps:
            save(checkpoint, model, optimizer, step)
        if stops:
            break
    dist.destroy_process_group()


def save(path: Path, model: DistributedDataParallel, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write the state of all ranks, which is the same on each; a rename makes it whole or absent."""
    if dist.get_rank() == 0:
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)


def restore(path: Path, model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> int:
    """Load the state of an earlier start, and return the first step that is left."""
    if not path.exists():
        return 1
    state = torch.load(path)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"]) + 1


if __name__ == "__main__":
    main()
