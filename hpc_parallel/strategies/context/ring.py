"""Attention over a sequence that is split over devices, forward and backward.

`Ring` (Liu et al. 2023) sends keys and values around the devices. Each hop overlaps with the computation on
the keys and values that arrived last. `Gather` collects all keys and values on every device in one
collective. Both use a fused kernel if there is one (`attention_kernels.py`), and add up parts in float32 or
better.

The zig-zag (Llama 3, Dubey et al. 2024, section 3.3.2) gives device r of P the slices r and 2P-1-r of 2P: an
early slice, which sees few keys, and a late slice, which sees many. For the keys of any other device, exactly
half of the products are behind the causal mask, in entire slices. They are skipped, and all devices compute
the same amount. Without the mask (`causal` is false), each device computes all products of its queries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpc_parallel.models.attention import document_bias
from hpc_parallel.strategies.context.attention_kernels import (
    Attended,
    Kernel,
    accumulated,
    kernel_for,
    masked_kernel,
    merge,
)
from hpc_parallel.strategies.ranges import marked
from hpc_parallel.torch_internals import all_gather, group_of, reduce_scatter


def slices_of(rank: int, *, degree: int, length: int) -> tuple[slice, slice]:
    """Where the two slices of a device lie in a sequence of `length`, a multiple of 2 x `degree`."""
    size = length // (2 * degree)
    late = 2 * degree - 1 - rank
    return slice(rank * size, (rank + 1) * size), slice(late * size, (late + 1) * size)


def indices_of(rank: int, *, degree: int, length: int, device: torch.device) -> Tensor:
    """The positions of a device's two slices in a sequence of `length`."""
    slices = slices_of(rank, degree=degree, length=length)
    return torch.cat([torch.arange(part.start, part.stop, device=device) for part in slices])


def visible(source: int, *, rank: int, half: int, causal: bool) -> tuple[slice, slice]:
    """Which queries of `rank` see which keys of another device `source`. A slice has the length `half`.

    If source < rank, the slices are in the order source, rank, ..., 2P-1-rank, 2P-1-source.
    """
    every, early, late = slice(None), slice(0, half), slice(half, None)
    if not causal:
        return every, every
    return (every, early) if source < rank else (late, every)


class KeyValueExchange(Protocol):
    """How a device sees the keys and values of the others.

    Queries and their outputs are [batch, head, seq, head_dim], `lse` is [batch, head, seq]. `kv` is
    [2, batch, kv_head, seq, head_dim]: the keys and values of this device's two slices.
    """

    def forward(
        self, query: Tensor, kv: Tensor, group: dist.ProcessGroup, *, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Returns the outputs in the dtype of `lse`, and `lse`."""

    def backward(
        self, attended: Attended, kv: Tensor, group: dist.ProcessGroup, *, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Returns the gradients of the queries and of `kv`, in the dtype of `lse`."""


@dataclass(frozen=True)
class Ring:
    """Keys and values pass every device; in the backward pass their gradients travel with them.

    starts: for packed documents, where in the sample the document of each query begins, [batch, seq].
    """

    starts: Tensor | None = None

    def forward(
        self, query: Tensor, kv: Tensor, group: dist.ProcessGroup, *, causal: bool
    ) -> tuple[Tensor, Tensor]:
        rank, degree, half = group.rank(), group.size(), kv.shape[-2] // 2
        kernel, next_kv = self._kernel(query), Passing(kv, group)
        bias = self._bias(query, rank, group)
        output, lse = accumulated(kernel.forward(query, kv, causal=causal and bias is None, bias=bias))
        for turn in range(1, degree):
            kv = next_kv.arrived()
            if turn < degree - 1:
                next_kv = Passing(kv, group)
            source = (rank - turn) % degree
            rows, columns = visible(source, rank=rank, half=half, causal=causal)
            bias = self._bias(query, source, group, rows, columns)
            part = kernel.forward(query[..., rows, :], kv[..., columns, :], causal=False, bias=bias)
            merge(output[..., rows, :], lse[..., rows], part=part)
        return output, lse

    def backward(
        self, attended: Attended, kv: Tensor, group: dist.ProcessGroup, *, causal: bool
    ) -> tuple[Tensor, Tensor]:
        rank, degree, half = group.rank(), group.size(), kv.shape[-2] // 2
        query, kernel, next_kv = attended.query, self._kernel(attended.query), Passing(kv, group)
        bias = self._bias(query, rank, group)
        parts = kernel.backward(attended, kv, causal=causal and bias is None, bias=bias)
        grad_query, grad_kv = (grad.to(attended.lse.dtype) for grad in parts)
        for turn in range(1, degree):
            next_grad_kv = Passing(grad_kv, group)
            kv = next_kv.arrived()
            if turn < degree - 1:
                next_kv = Passing(kv, group)
            source = (rank - turn) % degree
            rows, columns = visible(source, rank=rank, half=half, causal=causal)
            bias = self._bias(query, source, group, rows, columns)
            part_query, part_kv = kernel.backward(
                attended.rows(rows), kv[..., columns, :], causal=False, bias=bias
            )
            grad_query[..., rows, :] += part_query
            grad_kv = next_grad_kv.arrived()
            grad_kv[..., columns, :] += part_kv
        return grad_query, Passing(grad_kv, group).arrived()  # the last hop returns each gradient

    def _kernel(self, query: Tensor) -> Kernel:
        return kernel_for(query) if self.starts is None else masked_kernel(query)

    def _bias(
        self,
        query: Tensor,
        source: int,
        group: dist.ProcessGroup,
        rows: slice = slice(None),
        columns: slice = slice(None),
    ) -> Tensor | None:
        """What hides keys of the device `source` from these queries: other documents and later positions.

        A query may see no key of a device. The bias is finite, so such a part is finite too, and has a `lse`
        so low that its share of the merged result is zero.
        """
        if self.starts is None:
            return None
        here, there = (
            indices_of(rank, degree=group.size(), length=query.shape[-2] * group.size(), device=query.device)
            for rank in (group.rank(), source)
        )
        hidden = torch.finfo(query.dtype).min / 2
        starts = self.starts[:, rows]
        return document_bias(here[rows], there[columns], starts, dtype=query.dtype, hidden=hidden)


class Gather:
    """Every device gathers all keys and values in both passes. Their gradients are reduce-scattered."""

    @staticmethod
    def forward(
        query: Tensor, kv: Tensor, group: dist.ProcessGroup, *, causal: bool
    ) -> tuple[Tensor, Tensor]:
        kernel, all_kv = kernel_for(query), gather_kv(kv, group)
        results = []
        for rows, columns_of_rows in products_of(query, group, causal=causal):
            (columns, masked), *earlier = columns_of_rows
            part = kernel.forward(query[..., rows, :], all_kv[..., columns, :], causal=masked)
            output, lse = accumulated(part)
            for columns, masked in earlier:
                part = kernel.forward(query[..., rows, :], all_kv[..., columns, :], causal=masked)
                merge(output, lse, part=part)
            results.append((output, lse))
        outputs, sums = zip(*results, strict=True)
        return torch.cat(outputs, dim=-2), torch.cat(sums, dim=-1)

    @staticmethod
    def backward(
        attended: Attended, kv: Tensor, group: dist.ProcessGroup, *, causal: bool
    ) -> tuple[Tensor, Tensor]:
        query, wide = attended.query, attended.lse.dtype
        kernel, all_kv = kernel_for(query), gather_kv(kv, group)
        grad_query, grad_kv = (torch.zeros_like(tensor, dtype=wide) for tensor in (query, all_kv))
        for rows, columns_of_rows in products_of(query, group, causal=causal):
            for columns, masked in columns_of_rows:
                part_query, part_kv = kernel.backward(
                    attended.rows(rows), all_kv[..., columns, :], causal=masked
                )
                grad_query[..., rows, :] += part_query
                grad_kv[..., columns, :] += part_kv
        return grad_query, scatter_grad_kv(grad_kv, group)


# The exchanges by the value of strategy.context_attention, which can also be `all_to_all`.
EXCHANGES: dict[str, KeyValueExchange] = {"ring": Ring(), "gather": Gather()}


def exchange_of(name: str, starts: Tensor | None) -> KeyValueExchange:
    """The exchange of this name, for packed documents if there are `starts`."""
    return EXCHANGES[name] if starts is None else Ring(starts)


def attend_over_devices(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor | None,
    group_name: str,
    exchange: str,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Attention of this device's two slices of queries over the whole sequence.

    Inputs: [batch, head, seq, head_dim] of this device's two slices; `starts`: of packed documents, only for
    `ring`. Returns the outputs, which are like `query`, and `lse`.
    """
    group, kv = group_of(group_name), torch.stack((key, value))
    output, lse = exchange_of(exchange, starts).forward(query, kv, group, causal=causal)
    return by_position(output.to(query.dtype)), lse.contiguous()


def attend_over_devices_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    starts: Tensor | None,
    group_name: str,
    exchange: str,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of `query`, and of keys and values (stacked), in the dtypes of the inputs."""
    attended, group = Attended(gradient.contiguous(), query, output, lse), group_of(group_name)
    kv = torch.stack((key, value))
    grad_query, grad_kv = exchange_of(exchange, starts).backward(attended, kv, group, causal=causal)
    return by_position(grad_query.to(query.dtype)), grad_kv.to(key.dtype).contiguous()


# Operators of torch, because torch.compile can't compile a send, and selective checkpointing keeps results.
sequence_attention = torch.library.custom_op(
    "hpc_parallel::sequence_attention", attend_over_devices, mutates_args=()
)
sequence_attention_backward = torch.library.custom_op(
    "hpc_parallel::sequence_attention_backward", attend_over_devices_backward, mutates_args=()
)
OPERATORS: dict[Any, Callable[..., tuple[Tensor, Tensor]]] = {
    torch.ops.hpc_parallel.sequence_attention.default: attend_over_devices,
    torch.ops.hpc_parallel.sequence_attention_backward.default: attend_over_devices_backward,
}


@sequence_attention.register_fake
def _(query: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(query.dtype, torch.float32)
    return by_position(torch.empty_like(query)), query.new_empty(query.shape[:-1], dtype=wide)


@sequence_attention_backward.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return by_position(torch.empty_like(query)), key.new_empty((2, *key.shape))


def by_position(tensor: Tensor) -> Tensor:
    """[batch, head, seq, head_dim], in memory [batch, seq, head, head_dim] as fused kernels write it."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, starts, *ctx.options = inputs
    ctx.save_for_backward(query, key, value, *output, starts)


def _gradients(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    grad_query, grad_kv = sequence_attention_backward(gradient, *ctx.saved_tensors, *ctx.options)
    return grad_query, *grad_kv, None, None, None, None


sequence_attention.register_autograd(_gradients, setup_context=_keep)


class GatherKv(torch.autograd.Function):
    """Keys and values of all devices in the order of the sequence; their gradients go back to the owners."""

    @staticmethod
    def forward(ctx: Any, kv: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gather_kv(kv, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return scatter_grad_kv(gradients[0], ctx.group), None


class Passing:
    """Sends a tensor to the next device of a ring while the previous device's tensor arrives."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        rank, degree = group.rank(), group.size()
        self._outgoing = tensor  # kept until it is sent
        self._incoming = torch.empty_like(tensor)
        with marked("send_recv context"):
            send = dist.P2POp(dist.isend, tensor, group=group, group_peer=(rank + 1) % degree)
            receive = dist.P2POp(dist.irecv, self._incoming, group=group, group_peer=(rank - 1) % degree)
            self._works = dist.batch_isend_irecv([send, receive])

    def arrived(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._incoming


def products_of(
    query: Tensor, group: dist.ProcessGroup, *, causal: bool
) -> list[tuple[slice, list[tuple[slice, bool]]]]:
    """The rows of each slice of this device; for each, the spans of keys that it sees and whether to mask.

    A kernel can mask only a square: queries and keys at the same positions.
    """
    rank, degree, length = group.rank(), group.size(), query.shape[-2]
    if not causal:
        return [(slice(None), [(slice(None), False)])]
    half = length // 2
    products = []
    places = slices_of(rank, degree=degree, length=length * degree)
    for rows, place in zip((slice(0, half), slice(half, length)), places, strict=True):
        earlier = [(slice(0, place.start), False)] if place.start else []
        products.append((rows, [(place, True), *earlier]))
    return products


def gather_kv(kv: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[2, batch, kv_head, seq, head_dim] of all devices, in the order of the sequence."""
    all_kv = kv.new_empty((group.size(), *kv.shape))
    with marked("all_gather context"):
        all_gather(all_kv.flatten(0, 1), kv.contiguous(), group=group)
    return in_sequence(all_kv)


def gather_mask(key_mask: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[batch, seq] of this device's two slices -> [batch, seq] of the whole sequence, bool."""
    return gather_kv(key_mask[..., None].to(torch.uint8), group)[..., 0].bool()


def scatter_grad_kv(grad_kv: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum `grad_kv` over devices; returns this device's two slices. This is the backward of `gather_kv`."""
    by_device = from_sequence(grad_kv, degree=group.size()).contiguous()
    local = torch.empty_like(by_device[0])
    with marked("reduce_scatter context"):
        reduce_scatter(local, by_device.flatten(0, 1), group=group)
    return local


def in_sequence(by_device: Tensor) -> Tensor:
    """[device, ..., seq, dim], two slices of each device -> [..., seq, dim] in the order of the sequence."""
    early, late = by_device.chunk(2, dim=-2)
    return torch.cat([*early, *late.flip(0)], dim=-2)


def from_sequence(tensor: Tensor, *, degree: int) -> Tensor:
    """The inverse of `in_sequence`."""
    early, late = tensor.unflatten(-2, (2, degree, -1)).unbind(-4)
    return torch.cat([early, late.flip(-3)], dim=-2).movedim(-3, 0)
