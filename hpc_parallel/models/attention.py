"""Causal attention as a separate module, so that techniques can change where keys and values come from.

If a model mixes positions only in `CausalAttention` and gets position indices from it, its sequence can be
split over devices and it can generate with a cache. No technique needs to know the model's class.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class CausalAttention(nn.Module):
    """Each position attends to itself and to earlier positions."""

    def positions(self, length: int, *, device: torch.device) -> Tensor:
        """Indices in the sample of the `length` positions that this device has: [length], int64."""
        return torch.arange(length, device=device)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Returns the outputs, like `query`.

        All are [batch, head, seq, head_dim]; `key` and `value` may have fewer heads than `query`.
        """
        grouped = query.shape[1] != key.shape[1]  # only if needed: not every kernel supports it
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
