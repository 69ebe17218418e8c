"""Data whose reading ends, or never ends, on one rank and at one step; and the ways in which it does."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from hpc_parallel.data.text import TextData
from hpc_parallel.data.windows import Windows

NEVER_S = 600
CYCLES = 2**62  # of a GPU: years


class HarmedData(TextData):
    """`split`: of the samples; `how`: one that `harm` knows; `mark`: a file that is written before."""

    def __init__(
        self,
        *,
        rank: int,
        step: int,
        how: str = "sleep",
        split: str = "train",
        mark: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if dist.get_rank() == rank:
            setattr(self, split, Harmed(getattr(self, split), calls=step, how=how, mark=mark))


class Harmed:
    def __init__(self, samples: Windows, *, calls: int, how: str, mark: str | None) -> None:
        self.samples, self.calls, self.how, self.mark = samples, calls, how, mark

    def __len__(self) -> int:
        return len(self.samples)

    def batch(self, positions: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        if len(positions) > 1:  # a session looks at one sample before the first step
            self.calls -= 1
        if self.calls == 0:
            harm(self.how, mark=self.mark)
        return self.samples.batch(positions)


def harm(how: str, *, mark: str | None = None) -> None:
    """Do not return (`sleep`, `hold`: Python's lock too), signal this process, raise, or keep the GPU busy.

    After `kernel`, the host goes on; after `kernel, waits`, it waits for the GPU.
    """
    if mark is not None:
        Path(mark).touch()
    if how == "hold":
        ctypes.PyDLL(None).sleep(NEVER_S)  # a PyDLL keeps the lock while it is in C
    elif how == "raise":
        raise ValueError("planted")
    elif how.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[how])
    elif how.startswith("kernel") and torch.cuda.is_available():
        torch.cuda._sleep(CYCLES)
        if how.endswith("waits"):
            torch.cuda.synchronize()
    else:
        time.sleep(NEVER_S)
