"""Context parallelism: every sequence is split over devices, which communicate in attention only.

`ring.py` and `all_to_all_attention.py` implement this communication.

All other layers treat each position separately; terms of whole sequences add up their sums over devices.
Every device has all weights, or fully_shard slices them over this axis as over `shard`. Each computes
gradients of its own positions; all have equally many loss terms, so gradients are averaged over devices as
over replicas.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hpc_parallel.config.schema import StrategyConfig
from hpc_parallel.models.attention import (
    Attention,
    Bias,
    CausalAttention,
    FullAttention,
    Positions,
    attend_with,
    attend_within,
    product_dtype,
    require_documents_only,
)
from hpc_parallel.models.auxiliary_loss import SequenceSum
from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.problems import Problem, Problems
from hpc_parallel.strategies.context.all_to_all_attention import HeadsAttention
from hpc_parallel.strategies.context.ring import (
    GatherKv,
    gather_kv,
    gather_mask,
    indices_of,
    sequence_attention,
)
from hpc_parallel.strategies.dry_forward import find_local_positions
from hpc_parallel.strategies.mesh import all_reduce
from hpc_parallel.strategies.replace_forward import replace_modules

ALL_TO_ALL, RING = "all_to_all", "ring"


def apply(model: LayeredModel, *, axis: DeviceMesh, options: StrategyConfig) -> LayeredModel:
    """Let every attention of `model` (or a stage of it) see the whole sequence, which `axis` splits."""
    model.sample_positions = SlicedPositions(axis, kind=options.context_attention)
    replace_modules(model, Attention, partial(split_attention, axis=axis, kind=options.context_attention))
    replace_modules(model, SequenceSum, lambda _: SumOverParts(axis))
    return model


def split_attention(whole: Attention, *, axis: DeviceMesh, kind: str) -> Attention:
    """The replacement of `whole`; `kind`: strategy.context_attention."""
    if kind == ALL_TO_ALL:
        return HeadsAttention(SlicedPositions(axis), axis=axis, causal=whole.causal)
    return SplitAttention(axis=axis, exchange=kind, causal=whole.causal)


def find_problems(model: LayeredModel, *, degree: int, sample_shape: tuple[int, ...] | None) -> Problems:
    """Returns why the whole `model` on meta, or samples of this shape, can't be split over `degree`.

    `sample_shape`: None if it is not known yet.
    """
    kinds = {type(module) for module in model.modules() if isinstance(module, Attention)}
    others = sorted(kind.__name__ for kind in kinds - {CausalAttention, FullAttention})
    rule = ""
    if not kinds:
        rule = f"can't be used: {type(model).__name__} has no CausalAttention or FullAttention to split"
    elif others:
        rule = (
            f"can't be used: this package's attention can be split, but not its subclass {', '.join(others)}"
        )
    elif sample_shape is not None and (not sample_shape or sample_shape[0] % (2 * degree)):
        rule = f"does not split samples of shape {list(sample_shape)} into two slices a device"
    elif clause := find_local_positions(model):
        rule = f"can't be used: {type(model).__name__}.{clause}, and a device has only a part of a sequence"
    if rule:
        yield Problem("strategy.context", degree, rule, (1,))


class SlicedPositions(Positions):
    """The positions of this device's two slices. kind: strategy.context_attention."""

    def __init__(self, axis: DeviceMesh, *, kind: str = "ring") -> None:
        self._rank, self._degree = axis.get_local_rank(), axis.size()
        self._axis, self._kind = axis, kind

    def __call__(self, length: int, *, device: torch.device) -> Tensor:
        return indices_of(self._rank, degree=self._degree, length=length * self._degree, device=device)

    def key(self, length: int) -> Hashable:
        return self._rank, self._degree, length

    def documents(self, starts: Tensor, *, dtype: torch.dtype) -> Tensor:
        """Only `starts` for a ring, which makes a bias for the keys of each hop."""
        return starts if self._kind == RING else super().documents(starts, dtype=dtype)

    def places(self, starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All keys of the sample, and this device's queries; `HeadsAttention` has all queries too."""
        rows = self(starts.shape[1], device=starts.device)
        columns = torch.arange(len(rows) * self._degree, device=starts.device)
        if self._kind != ALL_TO_ALL:
            return rows, columns, starts
        return columns, columns, gather_kv(starts[..., None], self._axis.get_group())[..., 0]


class SumOverParts(SequenceSum):
    """Adds up the sums of all devices of `axis`; each gets the gradient of its own positions."""

    def __init__(self, axis: DeviceMesh) -> None:
        super().__init__()
        self.parts, self._axis = axis.size(), axis

    def forward(self, sums: Tensor) -> Tensor:
        return _AddParts.apply(sums, self._axis)  # type: ignore[no-any-return]


class _AddParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sums: Tensor, axis: DeviceMesh) -> Tensor:
        return all_reduce(sums.contiguous().clone(), axis=axis)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class SplitAttention(Attention):
    """Attention over the whole sequence; this device has two slices of it."""

    def __init__(self, *, axis: DeviceMesh, exchange: str, causal: bool) -> None:
        super().__init__(SlicedPositions(axis))
        self.causal = causal
        self._axis = axis
        self._exchange = exchange

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
        """Like `Attention.forward`.

        With a bias or a mask, every device gathers all keys and values, also if strategy.context_attention is
        ring.
        """
        dtype = product_dtype(query)  # torch applies autocast to its own attention
        query, key, value = (x.to(dtype) for x in (query, key, value))
        group = self._axis.get_group()
        if documents is not None:
            require_documents_only(bias, key_mask, causal=self.causal)
        with torch.autocast(query.device.type, enabled=False):  # parts are merged in float32
            if bias is None and key_mask is None and (documents is None or self._exchange == RING):
                options = (group.group_name, self._exchange, self.causal)
                out: Tensor = sequence_attention(query, key, value, documents, *options)[0]
                return out
            kv: Tensor = GatherKv.apply(torch.stack((key, value)), group)
            if documents is not None:
                return attend_within(documents, query, *kv)
            rows = self.positions(query.shape[2], device=query.device)
            columns = torch.arange(kv.shape[-2], device=query.device)
            if key_mask is not None:
                key_mask = gather_mask(key_mask, group)
            score_bias = self.score_bias(query, (rows, columns), bias=bias, key_mask=key_mask)
            return attend_with(score_bias, query, *kv)
