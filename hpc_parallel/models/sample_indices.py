"""The indices of the samples in the current forward pass, which `counted_dropout.py` needs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class SampleIndices:
    """The indices of the current microbatch's samples on this device, counted over the whole training.

    If `used`, the step sets the next batch, and the schedule sets the next microbatch.
    """

    def __init__(self) -> None:
        self.used = False  # whether a layer needs the indices
        self.of_replica: Callable[[Tensor], Tensor] = lambda rows: rows  # set for several replicas
        self._batch = self._current = torch.empty(0, dtype=torch.int64)

    def begin_batch(self, indices: NDArray[np.int64] | Tensor, *, device: torch.device) -> None:
        """Set the `indices` [batch] of the samples in this replica's next batch."""
        batch = torch.as_tensor(indices)
        batch = batch.pin_memory() if device.type == "cuda" and not batch.is_cuda else batch
        self._batch = self._current = batch.to(device, non_blocking=True)

    def begin_microbatch(self, index: int, *, count: int) -> None:
        """Set the microbatch of the next forward passes: number `index` (0-based) of `count`."""
        self._current = self._batch.chunk(count)[index]

    def current(self) -> Tensor:
        """The indices of the current microbatch [samples], for the replica of this thread."""
        return self.of_replica(self._current)

    def exchange(self, microbatch: Tensor) -> Tensor:
        """Set the current indices to `microbatch`, an earlier value of `current`; returns the old ones."""
        before, self._current = self._current, microbatch
        return before
