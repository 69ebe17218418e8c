"""Causal attention over a sequence that is split over devices, forward and backward.

Ring attention (Liu et al. 2023): keys and values go round, one hop while the last ones are computed with.
The zig-zag (Llama 3, Dubey et al. 2024, section 3.3.2) gives device r of P the slices r and 2P-1-r of 2P:
an early one, which sees little, and a late one, which sees much. Whichever device's keys come by, exactly
half of the products are behind the causal mask, in whole slices, so they are skipped and all devices have
as much to do. The other way, gathering all keys and values, is one collective and holds them all.
"""

from __future__ import annotations

from typing import Any

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


def visible(source: int, *, rank: int, half: int) -> tuple[slice, slice]:
    """Which queries of `rank` see which keys of another device `source`, both slices being `half` long.

    The slices lie as source, rank, ..., 2P-1-rank, 2P-1-source where source < rank.
    """
    every, early, late = slice(None), slice(0, half), slice(half, None)
    return (every, early) if source < rank else (late, every)


class Ring(torch.autograd.Function):
    """Keys and values pass every device; in the backward pass their gradients travel with them."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        """[batch, head, seq, head_dim] each, this device's two slices; like `query`."""
        rank, degree, half = group.rank(), group.size(), query.shape[-2] // 2
        queries, pairs = widened(query, key), torch.stack((key, value))
        following = Passing(pairs, group)
        outputs, log_sums = attend(queries, *pairs.to(queries.dtype), causal=True)
        for turn in range(1, degree):
            pairs = following.arrived()
            if turn < degree - 1:
                following = Passing(pairs, group)
            rows, seen = visible((rank - turn) % degree, rank=rank, half=half)
            keys, values = pairs.to(queries.dtype)[..., seen, :]
            part = attend(queries[..., rows, :], keys, values, causal=False)
            merge(outputs[..., rows, :], log_sums[..., rows, :], part=part)
        result = outputs.flatten(1, 2).to(query.dtype)
        ctx.save_for_backward(query, key, value, result, log_sums)
        ctx.group = group
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, result, log_sums = ctx.saved_tensors
        rank, degree, half = ctx.group.rank(), ctx.group.size(), query.shape[-2] // 2
        queries, pairs = widened(query, key), torch.stack((key, value))
        incoming = widened(gradient, key)
        slopes = (incoming * widened(result, key)).sum(-1, keepdim=True)
        following = Passing(pairs, ctx.group)
        of_queries, of_pairs = attend_backward(
            incoming, queries, *pairs.to(queries.dtype), log_sums=log_sums, slopes=slopes, causal=True
        )
        for turn in range(1, degree):
            coming = Passing(of_pairs, ctx.group)
            pairs = following.arrived()
            if turn < degree - 1:
                following = Passing(pairs, ctx.group)
            rows, seen = visible((rank - turn) % degree, rank=rank, half=half)
            for_queries, for_pairs = attend_backward(
                incoming[..., rows, :],
                queries[..., rows, :],
                *pairs.to(queries.dtype)[..., seen, :],
                log_sums=log_sums[..., rows, :],
                slopes=slopes[..., rows, :],
                causal=False,
            )
            of_queries[..., rows, :] += for_queries
            of_pairs = coming.arrived()
            of_pairs[..., seen, :] += for_pairs
        of_keys, of_values = Passing(of_pairs, ctx.group).arrived()  # home
        found = (of_queries.flatten(1, 2), of_keys, of_values)
        return *(grad.to(like.dtype) for grad, like in zip(found, (query, key, value), strict=True)), None


class Gather(torch.autograd.Function):
    """Every device gets all keys and values, in the backward pass again; their gradients are scattered."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        """[batch, head, seq, head_dim] each, this device's two slices; like `query`."""
        queries = widened(query, key)
        keys, values = gathered(torch.stack((key, value)), group).to(queries.dtype)
        outputs, log_sums = torch.empty_like(queries), torch.empty_like(queries[..., :1])
        for rows, end in ends_of(query, group):
            outputs[..., rows, :], log_sums[..., rows, :] = attend(
                queries[..., rows, :], keys[..., :end, :], values[..., :end, :], causal=True
            )
        result = outputs.flatten(1, 2).to(query.dtype)
        ctx.save_for_backward(query, key, value, result, log_sums)
        ctx.group = group
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, result, log_sums = ctx.saved_tensors
        queries, incoming = widened(query, key), widened(gradient, key)
        keys, values = gathered(torch.stack((key, value)), ctx.group).to(queries.dtype)
        slopes = (incoming * widened(result, key)).sum(-1, keepdim=True)
        of_queries, of_pairs = torch.empty_like(queries), queries.new_zeros((2, *keys.shape))
        for rows, end in ends_of(query, ctx.group):
            of_queries[..., rows, :], for_pairs = attend_backward(
                incoming[..., rows, :],
                queries[..., rows, :],
                keys[..., :end, :],
                values[..., :end, :],
                log_sums=log_sums[..., rows, :],
                slopes=slopes[..., rows, :],
                causal=True,
            )
            of_pairs[..., :end, :] += for_pairs
        of_keys, of_values = scattered(of_pairs, ctx.group)
        found = (of_queries.flatten(1, 2), of_keys, of_values)
        return *(grad.to(like.dtype) for grad, like in zip(found, (query, key, value), strict=True)), None


class Passing:
    """A tensor on its way to the next device of a ring, while the previous one's comes in."""

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


def widened(tensor: Tensor, key: Tensor) -> Tensor:
    """[batch, head, ...] -> [batch, kv_head, group, ...] by the heads of `key`, in float32 or better."""
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    return wide.unflatten(1, (key.shape[1], -1))  # type: ignore[no-any-return]


def ends_of(query: Tensor, group: dist.ProcessGroup) -> list[tuple[slice, int]]:
    """The rows of each of this device's two slices, and where the slice ends in the whole sequence."""
    rank, degree, length = group.rank(), group.size(), query.shape[-2]
    early, late = slices_of(rank, degree=degree, length=length * degree)
    half = length // 2
    return [(slice(0, half), early.stop), (slice(half, length), late.stop)]


def gathered(pairs: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[2, batch, kv_head, seq, head_dim] of all devices, in the order of the sequence."""
    everyones = pairs.new_empty((group.size(), *pairs.shape))
    all_gather(everyones.flatten(0, 1), pairs, group=group)
    early, late = everyones.chunk(2, dim=-2)
    return torch.cat([*early, *late.flip(0)], dim=-2)


def scattered(of_pairs: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over devices of this device's two slices: what `gathered` is to gradients."""
    early, late = of_pairs.unflatten(-2, (2, group.size(), -1)).unbind(-4)
    everyones = torch.cat([early, late.flip(-3)], dim=-2).movedim(-3, 0).contiguous()
    own = torch.empty_like(everyones[0])
    reduce_scatter(own, everyones.flatten(0, 1), group=group)
    return own
