"""A Hydra application: DDP, a checkpoint of its own, and a configuration of `key=value`.

    torchrun --nproc-per-node=2 hydra_app.py optimizer.lr=0.1 out=out

`die_at` is for tests: the step at which the last rank kills itself, if it has not resumed.
"""

import os
import signal
from dataclasses import dataclass, field

import hydra
import torch
import torch.distributed as dist
from hydra.core.config_store import ConfigStore
from torch.nn.parallel import DistributedDataParallel

SAMPLES = 8  # of all ranks in a step


@dataclass
class Optimizer:
    lr: float = 0.05
    momentum: float = 0.9


@dataclass
class Config:
    optimizer: Optimizer = field(default_factory=Optimizer)
    steps: int = 8
    out: str = "out"
    resume: str | None = None
    die_at: int | None = None


ConfigStore.instance().store("config", Config)


@hydra.main(version_base=None, config_name="config")
def main(config):
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 2)
    inputs, targets = torch.randn(config.steps, SAMPLES, 6), torch.randn(config.steps, SAMPLES, 2)
    optimizer = torch.optim.SGD(model.parameters(), **config.optimizer)
    first = 0
    if config.resume:
        state = torch.load(config.resume, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    wrapped = DistributedDataParallel(model)
    rows = slice(rank * SAMPLES // ranks, (rank + 1) * SAMPLES // ranks)
    for step in range(first, config.steps):
        if step == config.die_at and not config.resume and rank == ranks - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = torch.nn.functional.mse_loss(wrapped(inputs[step, rows]), targets[step, rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step + 1} loss {mean.item():.6f}", flush=True)
            if (step + 1) % 3 == 0:
                os.makedirs(config.out, exist_ok=True)
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
                torch.save(state, f"{config.out}/last.part")
                os.replace(f"{config.out}/last.part", f"{config.out}/last.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
