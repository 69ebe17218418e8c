"""The type of matrix products, which autocast may change."""

from __future__ import annotations

import torch
from torch import Tensor


def product_dtype(x: Tensor) -> torch.dtype:
    """The type in which a product of `x` is computed here: that of autocast, or its own."""
    kind = x.device.type
    autocasts = kind != "meta" and torch.is_autocast_enabled(kind)  # torch raises for meta
    return torch.get_autocast_dtype(kind) if autocasts else x.dtype
