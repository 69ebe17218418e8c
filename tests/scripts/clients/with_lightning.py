"""Lightning's `Trainer(strategy="ddp", num_nodes=2)` with the cluster environment of `--environment`.

    python with_lightning.py --environment auto --nodes 2 --out out

`auto` is Lightning's own choice. With `slurm`, Lightning saves and requeues the job at `--requeue-signal`.
`--die-at` and `--wait-at` are for tests: the step at which the last rank kills itself, if it has not resumed,
or all ranks sleep.
"""

import argparse
import os
import signal
import time

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment

SAMPLES = 8  # of all ranks in a step
ENVIRONMENTS = {
    "auto": list,
    "lightning": lambda: [LightningEnvironment()],
    "slurm": lambda: [SLURMEnvironment(requeue_signal=signal.Signals[options.requeue_signal])],
}


class Batches:
    """The batches of one rank. Lightning keeps the state of such a loader, and so resumes exactly."""

    def __init__(self, steps, *, rank, ranks):
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(steps, SAMPLES, 6, generator=generator)
        self.targets = torch.randn(steps, SAMPLES, 2, generator=generator)
        self.rows = slice(rank * SAMPLES // ranks, (rank + 1) * SAMPLES // ranks)
        self.step = 0

    def __len__(self):
        return len(self.inputs)

    def __iter__(self):
        while self.step < len(self):
            self.step += 1
            yield self.inputs[self.step - 1, self.rows], self.targets[self.step - 1, self.rows]

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


class Model(LightningModule):
    def __init__(self, steps):
        super().__init__()
        self.steps = steps
        self.net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))

    def train_dataloader(self):
        return Batches(self.steps, rank=self.trainer.global_rank, ranks=self.trainer.world_size)

    def training_step(self, batch, index):
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.net(inputs), targets)
        mean = self.trainer.strategy.reduce(loss.detach(), reduce_op="mean").item()
        if self.trainer.is_global_zero:
            print(f"step {self.global_step + 1} loss {mean:.6f}", flush=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Disturb(Callback):
    def __init__(self, *, die_at, wait_at):
        self.die_at, self.wait_at = die_at, wait_at

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.die_at and trainer.global_rank == trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if trainer.global_step == self.wait_at and not os.environ.get("SLURM_RESTART_COUNT"):
            print("waiting", flush=True)
            deadline = time.monotonic() + 240
            while not trainer.received_sigterm and time.monotonic() < deadline:
                time.sleep(0.1)


parser = argparse.ArgumentParser()
parser.add_argument("--nodes", type=int, default=1)
parser.add_argument("--devices", type=int, default=1)
parser.add_argument("--environment", choices=ENVIRONMENTS, default="auto")
parser.add_argument("--requeue-signal", default="SIGUSR1")
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--out", default="out")
parser.add_argument("--resume")
parser.add_argument("--die-at", type=int)
parser.add_argument("--wait-at", type=int)
options = parser.parse_args()
torch.manual_seed(0)
trainer = Trainer(
    accelerator="cpu", strategy="ddp", num_nodes=options.nodes, devices=options.devices,
    plugins=ENVIRONMENTS[options.environment](), max_steps=options.steps, default_root_dir=options.out,
    logger=False, enable_progress_bar=False, enable_model_summary=False,
    callbacks=[
        ModelCheckpoint(options.out, every_n_train_steps=3, save_last=True),
        Disturb(die_at=None if options.resume else options.die_at, wait_at=options.wait_at),
    ],
)  # fmt: skip
trainer.fit(Model(options.steps), ckpt_path=options.resume)
