"""A user's script of two ranks: it saves and continues, and harms rank 1 once at a step.

python own_training.py HOW MARK
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hpc_parallel import job_context
from tests.harmed_data import harm

STEPS, EVERY, HARMED = 40, 10, 25


def main(how: str, mark: str) -> None:
    gpu = torch.cuda.is_available()
    device = torch.device("cuda:0" if gpu else "cpu")
    dist.init_process_group("nccl" if gpu else "gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(64, 64).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert job_context.checkpoint_folder is not None
    saved, first = job_context.checkpoint_folder / "last.pt", 1
    if saved.exists():
        state = torch.load(saved, map_location=device)
        model.load_state_dict(state["model"])
        first = state["step"] + 1
    for step in range(first, STEPS + 1):
        if how and step == HARMED and dist.get_rank() == 1 and job_context.restarts == 0:
            harm(how, mark=mark)
        rows = torch.Generator().manual_seed(100 * step + dist.get_rank())
        loss = model(torch.randn(16, 64, generator=rows).to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.6f}", flush=True)
        job_context.log(step=step, loss=loss)
        if step % EVERY == 0 and dist.get_rank() == 0:
            torch.save({"model": model.state_dict(), "step": step}, saved)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
