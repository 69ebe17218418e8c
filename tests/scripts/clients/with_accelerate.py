"""A loop with accelerate's `Accelerator`, which saves and loads its own state.

    torchrun --nproc-per-node=2 with_accelerate.py --out state --resume state

`--die-at` is for tests: the step at which the last rank kills itself, if it has not resumed.
"""

import argparse
import os
import shutil
import signal

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed

SAMPLES = 8  # of all ranks in a step

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--out", default="state")
parser.add_argument("--resume")
parser.add_argument("--die-at", type=int)
options = parser.parse_args()
# The same samples in a step, whatever the number of ranks.
loading = DataLoaderConfiguration(use_seedable_sampler=True)
accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False, dataloader_config=loading)
set_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.randn(64, 2))
loader = torch.utils.data.DataLoader(data, batch_size=SAMPLES // accelerator.num_processes, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, options.steps)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
step = 0
if options.resume:
    accelerator.load_state(options.resume)
    step = scheduler.scheduler.last_epoch
    loader = accelerator.skip_first_batches(loader, step)
for inputs, targets in loader:
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    step += 1
    mean = accelerator.reduce(loss.detach(), reduction="mean").item()
    accelerator.print(f"step {step} loss {mean:.6f}", flush=True)
    if step % 3 == 0:
        accelerator.save_state(f"{options.out}.part")
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            shutil.rmtree(options.out, ignore_errors=True)
            os.rename(f"{options.out}.part", options.out)
        accelerator.wait_for_everyone()
    if step == options.die_at and not options.resume:
        if accelerator.process_index == accelerator.num_processes - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        accelerator.wait_for_everyone()
    if step == options.steps:
        break
accelerator.end_training()
