"""The positions of a sequence that this device has. Techniques that split a sequence replace `Positions`."""

from __future__ import annotations

import torch
from torch import Tensor


class Positions:
    """The whole sequence: the indices 0, 1, 2, ..."""

    def __call__(self, length: int, *, device: torch.device) -> Tensor:
        """Returns the indices in the sample of this device's `length` positions: [length], int64."""
        return torch.arange(length, device=device)
