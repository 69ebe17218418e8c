"""Attention as a separate module, so that techniques can change where keys and values come from.

If a model mixes positions only in `CausalAttention` or `FullAttention` and gets position indices from it, its
sequence can be split over devices. With `CausalAttention` alone, it can also generate with a cache. No
technique needs to know the model's class.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from hpc_parallel.models.positions import Positions


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
        grouped = query.shape[1] != key.shape[1]  # only if needed: not every kernel supports it
        return F.scaled_dot_product_attention(query, key, value, is_causal=self.causal, enable_gqa=grouped)


class CausalAttention(Attention):
    """Each position attends to itself and to earlier positions."""

    causal = True


class FullAttention(Attention):
    """Each position attends to all positions, as in an encoder."""

    causal = False
