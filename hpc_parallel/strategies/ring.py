"""Attention over a sequence that is split over devices, forward and backward.

`Ring` (Liu et al. 2023) sends keys and values around the devices; each hop overlaps with the computation on
the last ones. The zig-zag (Llama 3, Dubey et al. 2024, section 3.3.2) gives device r of P the slices r and
2P-1-r of 2P: an early one, which sees few keys, and a late one, which sees many. For the keys of any other
device, exactly half of the products are behind the causal mask, in entire slices. They are skipped, and all
devices compute the same amount. Without the mask (`causal` is false), each device computes all products of
its queries. `Gather` collects all keys and values on every device in one collective.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpc_parallel.strategies.partial_attention import attend, attend_backward, merge

_RENAMED = hasattr(dist, "all_gather_single")  # in torch 2.13
all_gather = dist.all_gather_single if _RENAMED else dist.all_gather_into_tensor
reduce_scatter = dist.reduce_scatter_single if _RENAMED else dist.reduce_scatter_tensor


def slices_of(rank: int, *, degree: int, length: int) -> tuple[slice, slice]:
    """Where the two slices of a device lie in a sequence of `length`, a multiple of 2 x `degree`."""
    size = length // (2 * degree)
    late = 2 * degree - 1 - rank
    return slice(rank * size, (rank + 1) * size), slice(late * size, (late + 1) * size)


def visible(source: int, *, rank: int, half: int, causal: bool) -> tuple[slice, slice]:
    """Which queries of `rank` see which keys of another device `source`, both slices being `half` long.

    The slices lie as source, rank, ..., 2P-1-rank, 2P-1-source where source < rank.
    """
    every, early, late = slice(None), slice(0, half), slice(half, None)
    if not causal:
        return every, every
    return (every, early) if source < rank else (late, every)


class Exchange(Protocol):
    """How a device sees the keys and values of the others.

    `query` and `grad_output` [batch, kv_head, group, seq, head_dim], `lse` and `delta` [..., seq, 1] have the
    dtype of the computation. `kv` [2, batch, kv_head, seq, head_dim] has the dtype of the model.
    """

    @staticmethod
    def forward(
        query: Tensor, kv: Tensor, group: dist.ProcessGroup, *, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Returns the outputs, like `query`, and `lse`."""

    @staticmethod
    def backward(
        grad_output: Tensor,
        query: Tensor,
        kv: Tensor,
        *,
        lse: Tensor,
        delta: Tensor,
        group: dist.ProcessGroup,
        causal: bool,
    ) -> tuple[Tensor, Tensor]:
        """Returns the gradients of `query` and of `kv`."""


class SequenceAttention(torch.autograd.Function):
    """Attention of this device's two slices of queries over the whole sequence."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        group: dist.ProcessGroup,
        exchange: Exchange,
        causal: bool,
    ) -> Tensor:
        """[batch, head, seq, head_dim] each, this device's two slices; like `query`."""
        outputs, lse = exchange.forward(upcast(query, key), torch.stack((key, value)), group, causal=causal)
        result = outputs.flatten(1, 2).to(query.dtype)
        ctx.save_for_backward(query, key, value, result, lse)
        ctx.group, ctx.exchange, ctx.causal = group, exchange, causal
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, result, lse = ctx.saved_tensors
        grad_output = upcast(gradient, key)
        grad_query, grad_kv = ctx.exchange.backward(
            grad_output,
            upcast(query, key),
            torch.stack((key, value)),
            lse=lse,
            delta=(grad_output * upcast(result, key)).sum(-1, keepdim=True),
            group=ctx.group,
            causal=ctx.causal,
        )
        gradients = (grad_query.flatten(1, 2), *grad_kv)
        inputs = (query, key, value)
        return *(grad.to(like.dtype) for grad, like in zip(gradients, inputs, strict=True)), None, None, None


class Ring:
    """Keys and values pass every device; in the backward pass their gradients travel with them."""

    @staticmethod
    def forward(
        query: Tensor, kv: Tensor, group: dist.ProcessGroup, *, causal: bool
    ) -> tuple[Tensor, Tensor]:
        rank, degree, half = group.rank(), group.size(), kv.shape[-2] // 2
        next_kv = Passing(kv, group)
        outputs, lse = attend(query, *kv.to(query.dtype), causal=causal)
        for turn in range(1, degree):
            kv = next_kv.arrived()
            if turn < degree - 1:
                next_kv = Passing(kv, group)
            rows, columns = visible((rank - turn) % degree, rank=rank, half=half, causal=causal)
            keys, values = kv.to(query.dtype)[..., columns, :]
            part = attend(query[..., rows, :], keys, values, causal=False)
            merge(outputs[..., rows, :], lse[..., rows, :], part=part)
        return outputs, lse

    @staticmethod
    def backward(
        grad_output: Tensor,
        query: Tensor,
        kv: Tensor,
        *,
        lse: Tensor,
        delta: Tensor,
        group: dist.ProcessGroup,
        causal: bool,
    ) -> tuple[Tensor, Tensor]:
        rank, degree, half = group.rank(), group.size(), kv.shape[-2] // 2
        next_kv = Passing(kv, group)
        grad_query, grad_kv = attend_backward(
            grad_output, query, *kv.to(query.dtype), lse=lse, delta=delta, causal=causal
        )
        for turn in range(1, degree):
            next_grad_kv = Passing(grad_kv, group)
            kv = next_kv.arrived()
            if turn < degree - 1:
                next_kv = Passing(kv, group)
            rows, columns = visible((rank - turn) % degree, rank=rank, half=half, causal=causal)
            part_query, part_kv = attend_backward(
                grad_output[..., rows, :],
                query[..., rows, :],
                *kv.to(query.dtype)[..., columns, :],
                lse=lse[..., rows, :],
                delta=delta[..., rows, :],
                causal=False,
            )
            grad_query[..., rows, :] += part_query
            grad_kv = next_grad_kv.arrived()
            grad_kv[..., columns, :] += part_kv
        return grad_query, Passing(grad_kv, group).arrived()  # the last hop brings each gradient home


class Gather:
    """Every device gets all keys and values, in the backward pass again; their gradients are scattered."""

    @staticmethod
    def forward(
        query: Tensor, kv: Tensor, group: dist.ProcessGroup, *, causal: bool
    ) -> tuple[Tensor, Tensor]:
        keys, values = gather_kv(kv, group).to(query.dtype)
        outputs, lse = torch.empty_like(query), torch.empty_like(query[..., :1])
        for rows, end in ends_of(query, group, causal=causal):
            outputs[..., rows, :], lse[..., rows, :] = attend(
                query[..., rows, :], keys[..., :end, :], values[..., :end, :], causal=causal
            )
        return outputs, lse

    @staticmethod
    def backward(
        grad_output: Tensor,
        query: Tensor,
        kv: Tensor,
        *,
        lse: Tensor,
        delta: Tensor,
        group: dist.ProcessGroup,
        causal: bool,
    ) -> tuple[Tensor, Tensor]:
        keys, values = gather_kv(kv, group).to(query.dtype)
        grad_query, grad_kv = torch.empty_like(query), query.new_zeros((2, *keys.shape))
        for rows, end in ends_of(query, group, causal=causal):
            grad_query[..., rows, :], part_kv = attend_backward(
                grad_output[..., rows, :],
                query[..., rows, :],
                keys[..., :end, :],
                values[..., :end, :],
                lse=lse[..., rows, :],
                delta=delta[..., rows, :],
                causal=causal,
            )
            grad_kv[..., :end, :] += part_kv
        return grad_query, scatter_grad_kv(grad_kv, group)


class Passing:
    """Sends a tensor to the next device of a ring while the previous device's one arrives."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        rank, degree = group.rank(), group.size()
        self._outgoing = tensor  # kept until it is sent
        self._incoming = torch.empty_like(tensor)
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, group=group, group_peer=(rank + 1) % degree),
                dist.P2POp(dist.irecv, self._incoming, group=group, group_peer=(rank - 1) % degree),
            ]
        )

    def arrived(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._incoming


def upcast(tensor: Tensor, key: Tensor) -> Tensor:
    """[batch, head, ...] -> [batch, kv_head, group, ...] by the heads of `key`, in float32 or better."""
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    return wide.unflatten(1, (key.shape[1], -1))  # type: ignore[no-any-return]


def ends_of(query: Tensor, group: dist.ProcessGroup, *, causal: bool) -> list[tuple[slice, int]]:
    """The rows of each of this device's two slices, and the end of the keys that the slice sees."""
    rank, degree, length = group.rank(), group.size(), query.shape[-2]
    if not causal:
        return [(slice(None), length * degree)]
    early, late = slices_of(rank, degree=degree, length=length * degree)
    half = length // 2
    return [(slice(0, half), early.stop), (slice(half, length), late.stop)]


def gather_kv(kv: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[2, batch, kv_head, seq, head_dim] of all devices, in the order of the sequence."""
    all_kv = kv.new_empty((group.size(), *kv.shape))
    all_gather(all_kv.flatten(0, 1), kv, group=group)
    early, late = all_kv.chunk(2, dim=-2)
    return torch.cat([*early, *late.flip(0)], dim=-2)


def scatter_grad_kv(grad_kv: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over devices of this device's two slices: the inverse of `gather_kv` for gradients."""
    early, late = grad_kv.unflatten(-2, (2, group.size(), -1)).unbind(-4)
    by_device = torch.cat([early, late.flip(-3)], dim=-2).movedim(-3, 0).contiguous()
    local = torch.empty_like(by_device[0])
    reduce_scatter(local, by_device.flatten(0, 1), group=group)
    return local
