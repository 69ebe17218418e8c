"""Attention as a separate module, so that techniques can change where keys and values come from.

If a model mixes positions only in `CausalAttention` or `FullAttention` and gets position indices from it, its
sequence can be split over devices. With `CausalAttention` alone, it can also generate with a cache. No
technique needs to know the model's class.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpc_parallel.models.positions import Positions
from hpc_parallel.models.product_dtype import product_dtype


class Attention(nn.Module):
    """What both kinds of attention share; `causal` says which positions are seen.

    `positions(length, device=...)` gives the indices in the sample of the positions that this device has.
    """

    causal: bool

    def __init__(self, positions: Positions | None = None) -> None:
        super().__init__()
        self.positions = positions or Positions()

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Returns the outputs, like `query`.

        All are [batch, head, seq, head_dim]; `key` and `value` may have fewer heads than `query`.
        """
        return attend(query, key, value, causal=self.causal)


def attend(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Tensor:
    """torch's attention, with keys and values expanded to the heads of `query` where no fused kernel groups.

    In float32 on a GPU only the memory-efficient kernel is left, which has no groups; torch would compute
    all scores instead.
    """
    grouped = query.shape[1] != key.shape[1]  # only if needed: not every kernel supports it
    if grouped and not has_groups(query.device.type, product_dtype(query)):
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        grouped = False
    return F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=grouped)


def has_groups(device_type: str, dtype: torch.dtype) -> bool:
    """Whether torch's fused attention lets query heads share a key-value head."""
    return device_type != "cuda" or dtype != torch.float32


class CausalAttention(Attention):
    """Each position attends to itself and to earlier positions."""

    causal = True


class FullAttention(Attention):
    """Each position attends to all positions, as in an encoder."""

    causal = False
