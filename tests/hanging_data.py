"""Data whose reading never ends, on one rank and from one step on."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from hpc_parallel.data.text import TextData
from hpc_parallel.data.windows import Windows

NEVER_S = 600


class HangingData(TextData):
    """`split`: of the samples; `how`: sleep, or hold (Python's lock, so that no thread can run)."""

    def __init__(
        self, *, rank: int, step: int, how: str = "sleep", split: str = "train", **options: Any
    ) -> None:
        super().__init__(**options)
        if dist.get_rank() == rank:
            setattr(self, split, Hanging(getattr(self, split), calls=step, how=how))


class Hanging:
    def __init__(self, samples: Windows, *, calls: int, how: str) -> None:
        self.samples, self.calls, self.how = samples, calls, how

    def __len__(self) -> int:
        return len(self.samples)

    def batch(self, positions: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        if len(positions) > 1:  # a session looks at one sample before the first step
            self.calls -= 1
        if self.calls == 0:
            self.never_ends()
        return self.samples.batch(positions)

    def never_ends(self) -> None:
        if self.how == "hold":
            ctypes.PyDLL(None).sleep(NEVER_S)  # a PyDLL keeps the lock while it is in C
        else:
            time.sleep(NEVER_S)
