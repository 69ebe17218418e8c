"""DeepSpeed's engine (ZeRO 1) with its own checkpoints.

    torchrun --nproc-per-node=2 with_deepspeed.py --out out

`--die-at` is for tests: the step at which the last rank kills itself, if it has not resumed.
"""

import argparse
import os
import signal

import deepspeed
import torch
import torch.distributed as dist

SAMPLES = 8  # of all ranks in a step
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--out", default="out")
parser.add_argument("--resume")
parser.add_argument("--die-at", type=int)
options = parser.parse_args()
deepspeed.init_distributed("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
inputs, targets = torch.randn(options.steps, SAMPLES, 6), torch.randn(options.steps, SAMPLES, 2)
engine, *_ = deepspeed.initialize(
    model=model,
    model_parameters=model.parameters(),
    config={
        "train_batch_size": SAMPLES,
        "train_micro_batch_size_per_gpu": SAMPLES // ranks,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
    },
)
if options.resume:
    engine.load_checkpoint(options.resume)
rows = slice(rank * SAMPLES // ranks, (rank + 1) * SAMPLES // ranks)
for step in range(engine.global_steps, options.steps):
    if step == options.die_at and not options.resume and rank == ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    loss = torch.nn.functional.mse_loss(engine(inputs[step, rows]), targets[step, rows])
    engine.backward(loss)
    engine.step()
    mean = loss.detach() / ranks
    dist.all_reduce(mean)
    if rank == 0:
        print(f"step {step + 1} loss {mean.item():.6f}", flush=True)
    if (step + 1) % 3 == 0:
        engine.save_checkpoint(options.out)
dist.destroy_process_group()
