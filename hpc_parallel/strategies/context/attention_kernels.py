"""Attention kernels that return each row's log-sum, so that partial results merge exactly.

The outputs over some of the keys are weighted by their share of the row's sum of exponentials, whose
logarithm is `lse` (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022). A kernel's backward pass
takes the merged outputs and the merged `lse`, and then returns exactly what its keys add to the gradients.

A query is [batch, head, seq, head_dim]; keys and values are [batch, kv_head, seq, head_dim], and `lse` is
[batch, head, seq]. Products have the dtype of the inputs; `lse` has float32 or better.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hpc_parallel import torch_internals

FLASH_CAPABILITY = (8, 0)  # Ampere; torch's own rule
FLASH_HEAD_DIM = 256  # the widest of torch's flash kernels
CUDNN_CAPABILITY = (9, 0)  # Hopper; from here on torch prefers cuDNN's attention
CUDNN_HEAD_DIM = 128  # the widest of cuDNN's kernels that all its versions have
ALIGNMENT_BYTES = 16  # the memory-efficient kernel needs rows of a head that are a multiple of this
STRIP = 2**18  # scores of a head that exist at a time: 1 MiB in float32, at any length
LSE_UNIT = 32  # the memory-efficient kernel's backward pass reads `lse` in rows of this many queries


class Attended(NamedTuple):
    """Queries in a backward pass: the gradient of their outputs, and the merged outputs and `lse`."""

    grad_output: Tensor
    query: Tensor
    output: Tensor
    lse: Tensor

    def rows(self, rows: slice) -> Attended:
        """Some positions of each sequence."""
        grad_output, query, output = (tensor[..., rows, :] for tensor in self[:3])
        return Attended(grad_output, query, output, self.lse[..., rows])


class Kernel(Protocol):
    """One way to compute attention over some of the keys.

    `causal`: queries and keys are at the same positions, and no query sees a key after its own. `bias`: what
    is added to the scores, [batch, 1, queries, keys], in finite numbers; only the kernels of `masked_kernel`
    take it.
    """

    def forward(
        self, query: Tensor, kv: Tensor, *, causal: bool, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns the outputs, like `query`, and `lse`. `kv`: keys and values, stacked."""

    def backward(
        self, attended: Attended, kv: Tensor, *, causal: bool, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Returns what `kv` adds to the gradients of the queries and of `kv`."""


@dataclass(frozen=True)
class Fused:
    """A kernel of torch, through its operators for both passes (`torch_internals`).

    grouped: whether several query heads may share a key-value head; if not, `kv` is repeated for each query
    head. lse_unit: the rows of the kernel's `lse` are padded to a multiple of this.
    """

    forward_kernel: Callable[..., tuple[Tensor, Tensor]]
    backward_kernel: Callable[..., tuple[Tensor, ...]]
    grouped: bool
    lse_unit: int = 1

    def forward(
        self, query: Tensor, kv: Tensor, *, causal: bool, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        key, value = self._for_heads_of(query, kv)
        output, lse = self.forward_kernel(query, key, value, causal=causal, **added(bias, query))
        return output, lse[..., : query.shape[-2]]

    def backward(
        self, attended: Attended, kv: Tensor, *, causal: bool, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        grad_output, query, output, lse = attended
        key, value = self._for_heads_of(query, kv)
        missing = -lse.shape[-1] % self.lse_unit
        padded = torch.nn.functional.pad(lse, (0, missing), value=torch.inf).contiguous()
        grad_query, *grad_kv = self.backward_kernel(
            grad_output, query, key, value, output, padded, causal=causal, **added(bias, query)
        )
        grads = torch.stack(grad_kv)
        if not self.grouped:
            grads = grads.unflatten(2, (kv.shape[2], -1)).sum(3)
        return grad_query, grads

    def _for_heads_of(self, query: Tensor, kv: Tensor) -> Tensor:
        group = query.shape[1] // kv.shape[2]
        return kv if self.grouped or group == 1 else kv.repeat_interleave(group, dim=2)


class Strips:
    """Attention in strips of scores, by torch's public operations in float32 or better (`attend`)."""

    def forward(
        self, query: Tensor, kv: Tensor, *, causal: bool, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        wide = grouped_upcast(query, kv)
        output, lse = attend(wide, *kv.to(wide.dtype), causal=causal, bias=bias)
        return output.flatten(1, 2), lse.flatten(1, 2).squeeze(-1)

    def backward(
        self, attended: Attended, kv: Tensor, *, causal: bool, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        grad, wide, output = (grouped_upcast(tensor, kv) for tensor in attended[:3])
        grad_query, grad_kv = attend_backward(
            grad,
            wide,
            *kv.to(wide.dtype),
            lse=attended.lse.unsqueeze(-1).unflatten(1, wide.shape[1:3]),
            delta=(grad * output).sum(-1, keepdim=True),
            causal=causal,
            bias=bias,
        )
        return grad_query.flatten(1, 2), grad_kv


CUDNN = Fused(torch_internals.cudnn_forward, torch_internals.cudnn_backward, grouped=True)
FLASH = Fused(torch_internals.flash_forward, torch_internals.flash_backward, grouped=True)
EFFICIENT = Fused(
    torch_internals.efficient_forward, torch_internals.efficient_backward, grouped=False, lse_unit=LSE_UNIT
)
CPU_FLASH = Fused(torch_internals.cpu_flash_forward, torch_internals.cpu_flash_backward, grouped=False)
STRIPS = Strips()


def kernel_for(query: Tensor) -> Kernel:
    """The kernel for queries of this device, dtype and width.

    Strips serve the cases for which no fused kernel is used: float64 on a GPU, bfloat16 on a GPU older than
    Ampere, widths that are not aligned, ROCm, whose `lse` has never been compared, and other devices.
    """
    if query.device.type == "cpu":
        return CPU_FLASH
    if query.device.type != "cuda" or torch.version.hip is not None:
        return STRIPS
    return cuda_kernel(
        query.dtype, head_dim=query.shape[-1], capability=torch.cuda.get_device_capability(query.device)
    )


def cuda_kernel(dtype: torch.dtype, *, head_dim: int, capability: tuple[int, int]) -> Kernel:
    """The kernel of an NVIDIA GPU."""
    half = dtype in (torch.bfloat16, torch.float16)
    half &= head_dim % 8 == 0
    ordered = torch.are_deterministic_algorithms_enabled()  # cuDNN's backward pass adds in any order
    if half and not ordered and head_dim <= CUDNN_HEAD_DIM and capability >= CUDNN_CAPABILITY:
        return CUDNN
    if half and head_dim <= FLASH_HEAD_DIM and capability >= FLASH_CAPABILITY:
        return FLASH
    bfloat16_fits = dtype is not torch.bfloat16 or capability >= FLASH_CAPABILITY
    aligned = head_dim * dtype.itemsize % ALIGNMENT_BYTES == 0
    return EFFICIENT if dtype is not torch.float64 and aligned and bfloat16_fits else STRIPS


def masked_kernel(query: Tensor) -> Kernel:
    """The kernel that takes a `bias`. On a GPU no fused one has been compared with a formula yet."""
    return CPU_FLASH if query.device.type == "cpu" else STRIPS


def added(bias: Tensor | None, query: Tensor) -> dict[str, Tensor]:
    """The argument `bias` of a fused kernel, for all heads; nothing without one: some kernels take none."""
    return {} if bias is None else {"bias": bias.to(query.dtype).expand(-1, query.shape[1], -1, -1)}


def accumulated(part: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Convert the first partial result to the dtype in which `merge` adds the others."""
    output, lse = part
    return output.to(lse.dtype), lse.contiguous()


def merge(output: Tensor, lse: Tensor, *, part: tuple[Tensor, Tensor]) -> None:
    """Add, in place, the result of the same queries over other keys."""
    part_output, part_lse = part
    total = torch.logaddexp(lse, part_lse)
    output.mul_((lse - total).exp_().unsqueeze(-1))
    output.add_(part_output * (part_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


def grouped_upcast(tensor: Tensor, kv: Tensor) -> Tensor:
    """[batch, head, ...] -> [batch, kv_head, group, ...] by the heads of `kv`, in float32 or better."""
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    return wide.unflatten(1, (kv.shape[2], -1))  # type: ignore[no-any-return]


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the outputs (like `query`) and the log of each row's sum of exponentials ([..., seq, 1]).

    Only one strip of the scores exists at a time. No strip is kept: the backward pass computes the scores
    again. Queries are [batch, kv_head, group, seq, head_dim], because each key-value head serves a group of
    query heads; keys and values are [batch, kv_head, seq, head_dim]. `causal`: the queries are at the last
    positions of the keys, and each sees no key after its own.
    """
    outputs, lse = torch.empty_like(query), torch.empty_like(query[..., :1])
    for rows, end, hidden in strips(query, key, causal=causal):
        scores = strip_of_scores(query[..., rows, :], key[..., :end, :], hidden, strip_of(bias, rows))
        lse[..., rows, :] = scores.logsumexp(-1, keepdim=True)
        weights = scores.sub_(lse[..., rows, :]).exp_()
        outputs[..., rows, :] = over_groups(weights, value[..., :end, :])
    return outputs, lse


def attend_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    lse: Tensor,
    delta: Tensor,
    causal: bool,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns what these keys add to the gradients of the queries, and of keys and values (stacked).

    `grad_output`: the gradient of the merged outputs. `lse`: the merged `lse`. `delta`: the dot product of
    grad_output and output in each row.
    """
    scale = query.shape[-1] ** -0.5
    grad_query = torch.empty_like(query)
    grad_kv = torch.zeros((2, *key.shape), dtype=query.dtype, device=query.device)
    for rows, end, hidden in strips(query, key, causal=causal):
        scores = strip_of_scores(query[..., rows, :], key[..., :end, :], hidden, strip_of(bias, rows))
        weights = scores.sub_(lse[..., rows, :]).exp_()
        grad_rows = grad_output[..., rows, :]
        grad_kv[1, ..., :end, :] += sum_of_groups(weights, grad_rows)
        grad_weights = over_groups(grad_rows, value[..., :end, :].mT)
        grad_scores = grad_weights.sub_(delta[..., rows, :]).mul_(weights).mul_(scale)
        grad_query[..., rows, :] = over_groups(grad_scores, key[..., :end, :])
        grad_kv[0, ..., :end, :] += sum_of_groups(grad_scores, query[..., rows, :])
    return grad_query, grad_kv


def strips(query: Tensor, key: Tensor, *, causal: bool) -> Iterator[tuple[slice, int, Tensor | None]]:
    """Rows of queries, the end of the keys that they can see, and a mask of the hidden keys ([row, key])."""
    queries, keys = query.shape[-2], key.shape[-2]
    before, height = keys - queries, max(1, STRIP // keys)
    for start in range(0, queries, height):
        stop = min(start + height, queries)
        if causal:
            end = before + stop
            hidden = torch.ones(stop - start, end, dtype=torch.bool, device=query.device)
            yield slice(start, stop), end, hidden.triu_(before + start + 1)
        else:
            yield slice(start, stop), keys, None


def strip_of(bias: Tensor | None, rows: slice) -> Tensor | None:
    """[batch, 1, 1, row, key]: the dims of grouped scores."""
    return None if bias is None else bias[:, :, None, rows]


def strip_of_scores(query: Tensor, key: Tensor, hidden: Tensor | None, bias: Tensor | None) -> Tensor:
    scores = over_groups(query, key.mT).mul_(query.shape[-1] ** -0.5)
    if bias is not None:
        scores += bias
    return scores if hidden is None else scores.masked_fill_(hidden, -torch.inf)


def over_groups(left: Tensor, right: Tensor) -> Tensor:
    """[..., group, row, a] x [..., a, b] -> [..., group, row, b]; `right` is not copied for each group."""
    rows = left.flatten(-3, -2) @ right
    return rows.unflatten(-2, left.shape[-3:-1])  # type: ignore[no-any-return]


def sum_of_groups(left: Tensor, right: Tensor) -> Tensor:
    """[..., group, row, a] x [..., group, row, b] -> [..., a, b], summed over group and row."""
    return left.flatten(-3, -2).mT @ right.flatten(-3, -2)
