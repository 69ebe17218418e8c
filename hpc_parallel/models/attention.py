"""Attention as a separate module, so that techniques can change where keys and values come from.

If a model mixes positions only in `CausalAttention` or `FullAttention` and gets position indices from it, its
sequence can be split over devices. With `CausalAttention` alone, the model can also generate with a
cache. No technique needs to know the model's class.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Tables = TypeVar("Tables")
Bias = Callable[[Tensor, Tensor], Tensor]
"""(indices of queries [q], indices of keys [k]) -> what is added to the scores: [heads or 1, q, k].

It may have weights, as T5's relative positions do; ALiBi has none. -inf hides a key.
"""
LocalBias = Callable[[Tensor, int], Tensor]
"""(a bias of all heads, the number of heads on this device) -> the part for the heads of this device."""


class Positions:
    """The positions of a sequence that this device has. In this class, these are all positions: 0, 1, 2, ...

    Techniques that split a sequence replace this object.
    """

    def __call__(self, length: int, *, device: torch.device) -> Tensor:
        """The `length` positions that this device has, as indices in the sample: [length], int64."""
        return torch.arange(length, device=device)

    def key(self, length: int) -> Hashable | None:
        """A key of the indices: equal keys mean equal indices. None if nothing is known about them."""
        return length if type(self) is Positions else None

    def documents(self, starts: Tensor, *, dtype: torch.dtype) -> Tensor:
        """What keeps causal attention inside documents: [batch, 1, q, k], 0 for a visible key, else -inf.

        `starts`: for each position that this device has, the index in the sample at which its document
        begins, [batch, seq]. The queries and the keys are those of the attention on this device.
        """
        return document_bias(*self.places(starts), dtype=dtype, hidden=-torch.inf)

    def places(self, starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The indices of the queries [q] and of the keys [k], and the `starts` of the queries [batch, q]."""
        indices = self(starts.shape[1], device=starts.device)
        return indices, indices, starts


def document_bias(
    rows: Tensor, columns: Tensor, starts: Tensor, *, dtype: torch.dtype, hidden: float
) -> Tensor:
    """[batch, 1, q, k]: 0 where causal attention inside documents sees the key, else `hidden`.

    `rows` [q] and `columns` [k]: the indices of queries and keys in the sample. `starts` [batch, q]: where
    the document of each query begins.
    """
    outside = (columns > rows[:, None]) | (columns < starts[..., None])
    bias = torch.zeros(outside.shape, dtype=dtype, device=outside.device)
    return bias.masked_fill(outside, hidden)[:, None]


class PositionTables(Generic[Tables]):
    """Tables of the positions, such as their angles, computed once for all blocks and recomputations.

    Compiled code only reads tables of earlier calls, because a compiled recomputation may not write.
    """

    def __init__(self) -> None:
        self._by_device: dict[str, tuple[Hashable, Tables]] = {}  # nn.DataParallel has several devices

    def __call__(
        self, key: Hashable | None, compute: Callable[[], Tables], *, device: torch.device
    ) -> Tables:
        """The tables of the last call with this `key`, or new ones. Without a key, they are always new."""
        if key is None:
            return compute()
        kept = self._by_device.get(str(device))
        if kept is None or kept[0] != key:
            if torch.compiler.is_compiling():
                return compute()
            kept = key, compute()
            self._by_device[str(device)] = kept
        return kept[1]


class Attention(nn.Module):
    """The base of both kinds of attention; `causal` decides which positions a query sees.

    `positions(length, device=...)` gives the positions that this device has, as indices in the sample.
    """

    causal: bool
    local_bias: LocalBias | None = None  # with strategy.tensor; None: this device has all heads

    def __init__(self, positions: Positions | None = None) -> None:
        super().__init__()
        self.positions = positions or Positions()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        bias: Bias | None = None,
        key_mask: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Returns the outputs, like `query`; zeros for a query that sees no key.

        `query`, `key`, `value` and the outputs are [batch, head, seq, head_dim]; `key` and `value` may have
        fewer heads than `query`. `key_mask`: [batch, seq] bool of this device's positions, False where no
        query may see the key (padding). `documents`: from `Positions.documents`, for causal attention.
        """
        if documents is not None:
            require_documents_only(bias, key_mask, causal=self.causal)
            return attend_within(documents, query, key, value)
        if bias is None and key_mask is None:
            return attend(query, key, value, causal=self.causal)
        indices = self.positions(query.shape[2], device=query.device)
        score_bias = self.score_bias(query, (indices, indices), bias=bias, key_mask=key_mask)
        return attend_with(score_bias, query, key, value)

    def score_bias(
        self,
        query: Tensor,
        indices: tuple[Tensor, Tensor],
        *,
        bias: Bias | None,
        key_mask: Tensor | None,
    ) -> Tensor:
        """The values to add to the scores: [batch or 1, heads or 1, q, k], -inf where a key is hidden.

        `indices`: the positions of the queries and of the keys in the sample.

        Raises ValueError for a bias of another shape.
        """
        rows, columns = indices
        score_bias = torch.zeros(1, len(rows), len(columns), dtype=product_dtype(query), device=query.device)
        if bias is not None:
            score_bias, heads = bias(rows, columns).to(score_bias.dtype), query.shape[1]
            if self.local_bias is not None:
                score_bias = self.local_bias(score_bias, heads)
            require_shape(score_bias, heads=heads, indices=indices)
        if self.causal:
            score_bias = score_bias.masked_fill(columns > rows[:, None], -torch.inf)
        score_bias = score_bias[None]
        if key_mask is None:
            return score_bias
        return score_bias.masked_fill(~key_mask[:, None, None, :], -torch.inf)


def require_shape(score_bias: Tensor, *, heads: int, indices: tuple[Tensor, Tensor]) -> None:
    """Raises ValueError unless a bias has one head or all heads, and a number for each query and key."""
    places = tuple(len(of) for of in indices)
    if score_bias.dim() == 3 and score_bias.shape[0] in (1, heads) and score_bias.shape[1:] == places:
        return
    raise ValueError(
        f"The bias of an attention has the shape {list(score_bias.shape)}, and [{heads} heads or 1, "
        f"{places[0]} queries, {places[1]} keys] is needed."
    )


def attend_with(score_bias: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention with `score_bias`. A query that sees no key gives zeros: torch's kernels differ there."""
    sees_no_key = (score_bias == -torch.inf).all(-1, keepdim=True)
    output = attend_within(score_bias.masked_fill(sees_no_key, 0.0), query, key, value)
    return output.masked_fill(sees_no_key, 0.0)


def attend_within(score_bias: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention with `score_bias` [batch or 1, heads or 1, q, k], in which each query sees a key.

    The blocks of a model share the bias of packed documents, so it must not be copied here.
    """
    if query.shape[1] != key.shape[1]:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    score_bias = score_bias.to(query.dtype).expand(len(query), query.shape[1], -1, -1)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=score_bias)


def require_documents_only(bias: Bias | None, key_mask: Tensor | None, *, causal: bool) -> None:
    """Raises ValueError for what attention can't combine with packed documents."""
    if bias is not None or key_mask is not None or not causal:
        other = (
            "in both directions" if not causal else "with a bias" if bias is not None else "with a key_mask"
        )
        raise ValueError(f"attention {other} can't keep packed documents apart: set data.packing=false")


def attend(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Tensor:
    """torch's attention. If no fused kernel groups heads, keys and values are expanded to the query heads.

    In float32 on a GPU, only the memory-efficient kernel is left. It does not group heads, so torch would
    compute all scores instead.
    """
    grouped = query.shape[1] != key.shape[1]  # only if needed: not every kernel supports it
    if grouped and not has_groups(query.device.type, product_dtype(query)):
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        grouped = False
    return F.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=grouped)


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a product of `x` is computed here: the dtype of autocast, or of `x`."""
    kind = x.device.type
    autocasts = kind != "meta" and torch.is_autocast_enabled(kind)  # torch raises for meta
    return torch.get_autocast_dtype(kind) if autocasts else x.dtype


def has_groups(device_type: str, dtype: torch.dtype) -> bool:
    """Whether torch's fused attention lets query heads share a key-value head."""
    return device_type != "cuda" or dtype != torch.float32


class CausalAttention(Attention):
    """Each position attends to itself and to earlier positions."""

    causal = True


class FullAttention(Attention):
    """Each position attends to all positions, as in an encoder."""

    causal = False
