"""A kernel that never ends, started by a callback of the training."""

from __future__ import annotations

import time

import torch

from hpc_parallel.training.callbacks import Callback


class Endless(Callback):
    """After `step`, the GPU counts cycles for years; without one, the host sleeps."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step(self, step: int) -> None:
        if step != self._step:
            return
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda._sleep(2**62)
        else:
            time.sleep(10**6)
