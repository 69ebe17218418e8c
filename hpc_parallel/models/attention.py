"""Causal attention as a module of its own, so that techniques can change where keys and values come from.

A model that mixes positions by `CausalAttention`, and asks it where they are, can have its sequence split
over devices and can be decoded with a cache; no technique has to know the model's class.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class CausalAttention(nn.Module):
    """Each position looks at itself and at those before it."""

    def positions(self, length: int, *, device: torch.device) -> Tensor:
        """Where in the sample the `length` positions stand that this device has now: [length], int64."""
        return torch.arange(length, device=device)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[batch, head, seq, head_dim] each, the two last of fewer heads or as many; like `query`."""
        grouped = query.shape[1] != key.shape[1]  # said only where true: not every kernel takes it
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
