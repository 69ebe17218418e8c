"""Attention over a sequence that is split over devices, by heads (DeepSpeed-Ulysses, Jacobs et al. 2023).

One all-to-all gives each device the whole sequence of some of the heads. Another one brings the outputs
back. Between the two, each device runs ordinary attention. A device needs at least one whole head, so the
degree must divide the heads; a key-value head that serves several devices is sent to each of them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hpc_parallel.models.attention import Attention, Bias, Positions, attend_with
from hpc_parallel.problems import ConfigError, Problem
from hpc_parallel.strategies.context.ring import from_sequence, gather_mask, in_sequence
from hpc_parallel.strategies.ranges import marked
from hpc_parallel.torch_internals import all_to_all_rows


class HeadsAttention(Attention):
    """Attention over the whole sequence; this device computes its share of the heads."""

    def __init__(self, positions: Positions, *, axis: DeviceMesh, causal: bool) -> None:
        super().__init__(positions)
        self.causal = causal
        self._axis = axis

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
        degree, group = self._axis.size(), self._axis.get_group()
        heads, kv_heads = query.shape[1], key.shape[1]
        require_heads(heads, kv_heads, degree=degree)
        copies = max(1, degree // kv_heads)
        per_device = [
            x.unflatten(1, (degree, -1))
            for x in (query, *(x.repeat_interleave(copies, dim=1) for x in (key, value)))
        ]
        sent = torch.cat(per_device, dim=2).movedim(1, 0)  # [device, batch, its heads, seq, head_dim]
        received = in_sequence(AllToAll.apply(sent, group))
        kv = kv_heads * copies // degree
        parts = received.split([heads // degree, kv, kv], dim=1)
        if bias is None and key_mask is None:
            output = super().forward(*parts, documents=documents)
        else:
            indices = torch.arange(received.shape[2], device=query.device)
            mask = None if key_mask is None else gather_mask(key_mask, group)
            score_bias = self.score_bias(query, (indices, indices), bias=bias, key_mask=mask)
            if score_bias.shape[1] > 1:  # it has all heads: take those of this device
                score_bias = score_bias.unflatten(1, (degree, -1))[:, self._axis.get_local_rank()]
            output = attend_with(score_bias, *parts)
        returned: Tensor = AllToAll.apply(from_sequence(output, degree=degree), group)
        return returned.movedim(0, 1).flatten(1, 2)


class AllToAll(torch.autograd.Function):
    """Sends entry i of the first dim to device i of the group, and receives one from each device."""

    @staticmethod
    def forward(ctx: Any, by_device: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        one_each = [1] * group.size()
        with marked("all_to_all context"):
            return all_to_all_rows(by_device.contiguous(), sent=one_each, received=one_each, group=group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return AllToAll.apply(gradients[0], ctx.group), None


def require_heads(heads: int, kv_heads: int, *, degree: int) -> None:
    """Raises ConfigError if the devices can't have whole heads.

    The login node checks this only for models whose heads it knows (`config/checks/axis_checks.py`).
    """
    if heads % degree or (kv_heads % degree and degree % kv_heads):
        rule = (
            f"can't give each device whole heads of an attention with {heads} heads and {kv_heads} kv_heads"
        )
        problem = Problem("strategy.context_attention", "all_to_all", rule, ("ring", "gather"))
        raise ConfigError([problem])
