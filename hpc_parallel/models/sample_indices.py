"""Which samples a forward pass is of. Dropout needs them (strategies/dropout.py)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class SampleIndices:
    """The indices in the training of the samples of the current microbatch, on this device.

    If they are `used`, a step says which batch comes next, and a schedule which microbatch.
    """

    def __init__(self) -> None:
        self.used = False  # whether a layer asks
        self.of_replica: Callable[[Tensor], Tensor] = lambda rows: rows  # if one process has several replicas
        self._batch = self._current = torch.empty(0, dtype=torch.int64)

    def begin_batch(self, indices: NDArray[np.int64] | Tensor, *, device: torch.device) -> None:
        """`indices` [batch] of the samples of this replica's next batch."""
        batch = torch.as_tensor(indices)
        batch = batch.pin_memory() if device.type == "cuda" and not batch.is_cuda else batch
        self._batch = self._current = batch.to(device, non_blocking=True)

    def begin_microbatch(self, index: int, *, count: int) -> None:
        """The forward passes that follow are those of the microbatch `index` of `count`."""
        self._current = self._batch.chunk(count)[index]

    def current(self) -> Tensor:
        """[samples of the microbatch] on this thread's replica."""
        return self.of_replica(self._current)

    def exchange(self, microbatch: Tensor) -> Tensor:
        """Make `microbatch`, once `current`, the current one again; returns the one before."""
        before, self._current = self._current, microbatch
        return before
