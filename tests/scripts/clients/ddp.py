"""The loop of torch's DistributedDataParallel tutorial, with the conventions of torchrun.

    torchrun --nproc-per-node=2 ddp.py --steps 12

`--fail-at` and `--sleep-at` are for tests: the step at which rank 1 raises, or every rank waits.
"""

import argparse
import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class ToyModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = torch.nn.Linear(10, 10)
        self.relu = torch.nn.ReLU()
        self.net2 = torch.nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="losses.json")
    parser.add_argument("--fail-at", type=int)
    parser.add_argument("--sleep-at", type=int)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    assert int(os.environ["LOCAL_RANK"]) < int(os.environ["LOCAL_WORLD_SIZE"])
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(ToyModel())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    inputs, labels = torch.randn(args.steps, 20, 10), torch.randn(args.steps, 20, 5)
    losses = []
    for step in range(args.steps):
        if step == args.fail_at and rank == ranks - 1:
            raise ValueError(f"no data for step {step}")
        if step == args.sleep_at:
            time.sleep(600)
        rows = slice(rank * 20 // ranks, (rank + 1) * 20 // ranks)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs[step, rows]), labels[step, rows])
        loss.backward()
        optimizer.step()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        losses.append(mean.item())
        if rank == 0:
            print(f"step {step + 1} of {args.steps} loss {mean.item():.6f}")
    if rank == 0:
        with open(args.out, "w") as file:
            json.dump(losses, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # threads of gloo abort some processes at a plain exit (torch 2.13, docs/own-script.md)
