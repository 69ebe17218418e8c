"""Experts as a separate module, so that a technique can compute some of them on other devices.

If a model keeps its experts in `Experts`, they can be split over devices (`strategies/expert.py`). The
technique does not need to know the model's class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpc_parallel.models.attention import product_dtype

WIDTH_DIMS = {"gate": 1, "up": 1, "down": 2}  # of the weights: the dim of an expert's inner width
ALIGNMENT_BYTES = 16  # of each row, as torch's kernel needs it; the backward pass reads rows of `out` too


class Experts(nn.Module):
    """SwiGLU layers, one for each expert: down(silu(gate(x)) * up(x)). Weights are [expert, out, in].

    widen, narrow: the products with `gate` and `up`, and with `down`. A technique may replace them.
    """

    def __init__(self, count: int, *, dim: int, hidden: int) -> None:
        super().__init__()
        self.count = count
        self.gate = nn.Parameter(torch.empty(count, hidden, dim))
        self.up = nn.Parameter(torch.empty(count, hidden, dim))
        self.down = nn.Parameter(torch.empty(count, dim, hidden))
        self.widen: Callable[[Tensor, Tensor, Tensor], Tensor] = grouped_product
        self.narrow: Callable[[Tensor, Tensor, Tensor], Tensor] = grouped_product
        self.on_counts: Callable[[Tensor], Any] | None = None

    def announce(self, counts: Tensor) -> Any:
        """Optional: tell `counts` before the rows are sorted; returns what the forward pass takes for them.

        Devices that split the experts exchange the counts while the rows are sorted.
        """
        return counts if self.on_counts is None else self.on_counts(counts)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Returns the outputs of `rows` [row, dim], which are sorted by expert; `counts` [expert], int64."""
        ends = counts.cumsum(0, dtype=torch.int32)
        hidden = F.silu(self.widen(rows, self.gate, ends)) * self.widen(rows, self.up, ends)
        return self.narrow(hidden, self.down, ends)


def grouped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group of `rows` [row, in] by its matrix of `weights` [group, out, in].

    ends: the index after the last row of each group, [group], int32. torch has one kernel for all groups. The
    kernel takes aligned rows only, so other rows are padded. It does not take float64: for float64, the host
    reads `ends` and each group is a separate product. Compiled code has one operator for all of this, because
    torch 2.13 can compile its kernel in bfloat16 only.
    """
    dtype = product_dtype(rows)
    rows, weights = rows.to(dtype), weights.to(dtype)
    if torch.compiler.is_compiling():
        return product_of_groups(rows, weights, ends)  # type: ignore[no-any-return]
    return _product(rows, weights, ends)


def _product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    if rows.dtype != torch.float64:
        more_out, more_in = (_padding(size, rows.dtype) for size in weights.shape[1:])
        if more_out or more_in:
            padded = F.pad(weights, (0, more_in, 0, more_out)).transpose(-2, -1)
            return F.grouped_mm(F.pad(rows, (0, more_in)), padded, offs=ends)[:, : weights.shape[1]]
        return F.grouped_mm(rows, weights.transpose(-2, -1), offs=ends)
    groups = zip(rows.split(_sizes(ends)), weights, strict=True)
    return torch.cat([F.linear(group, weight) for group, weight in groups])


def _padding(size: int, dtype: torch.dtype) -> int:
    return -size % (ALIGNMENT_BYTES // dtype.itemsize)


def _sizes(ends: Tensor) -> list[int]:
    sizes: list[int] = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return sizes


@torch.library.custom_op("hpc_parallel::product_of_groups", mutates_args=())
def product_of_groups(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """As `grouped_product`, in one operator, so that compiled code needs no sizes of groups."""
    return _product(rows.contiguous(), weights.contiguous(), ends).contiguous()


@product_of_groups.register_fake
def _(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[1])


@torch.library.custom_op("hpc_parallel::weight_gradients_of_groups", mutates_args=())
def weight_gradients_of_groups(rows: Tensor, gradient: Tensor, ends: Tensor) -> Tensor:
    """The gradient of the weights [group, out, in]; `gradient` [row, out] is that of the product."""
    if rows.dtype == torch.float64:
        groups = zip(rows.split(_sizes(ends)), gradient.split(_sizes(ends)), strict=True)
        return torch.stack([of_outputs.T @ inputs for inputs, of_outputs in groups])
    (_, columns_in), (_, columns_out) = rows.shape, gradient.shape
    inputs, of_outputs = (F.pad(x, (0, _padding(x.shape[1], x.dtype))) for x in (rows, gradient))
    products = F.grouped_mm(of_outputs.transpose(0, 1), inputs, offs=ends)
    return products[:, :columns_out, :columns_in].contiguous()


@weight_gradients_of_groups.register_fake
def _(rows: Tensor, gradient: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(ends.shape[0], gradient.shape[1], rows.shape[1])


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    rows, weights, ends = ctx.saved_tensors
    of_rows = product_of_groups(gradient, weights.transpose(1, 2), ends)
    return of_rows, weight_gradients_of_groups(rows, gradient, ends), None


product_of_groups.register_autograd(
    _gradients, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


class SharedExperts(nn.Module):
    """Experts that every token uses, as one SwiGLU layer. A device of the expert axis has all of them.

    With `strategy.tensor`, a module of the role `experts` must keep such layers here, to be split by width.
    widen, narrow: as in `Experts`.
    """

    def __init__(self, *, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(hidden, dim))
        self.up = nn.Parameter(torch.empty(hidden, dim))
        self.down = nn.Parameter(torch.empty(dim, hidden))
        self.widen: Callable[[Tensor, Tensor], Tensor] = F.linear
        self.narrow: Callable[[Tensor, Tensor], Tensor] = F.linear

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.widen(x, self.gate)) * self.widen(x, self.up)
        return self.narrow(hidden, self.down)


def width_dim(module: nn.Module, name: str) -> int | None:
    """The dim of the inner width in the weight `name` of `module`; None if `module` has no experts."""
    if isinstance(module, Experts):
        return WIDTH_DIMS[name]
    return WIDTH_DIMS[name] - 1 if isinstance(module, SharedExperts) else None


class LoadBalance(nn.Module):
    """A bias for each expert, added to its score when a token's experts are chosen, not to its gate.

    Wang et al. 2024 (balance without a loss), DeepSeek-AI 2024 (V3). After each optimizer step,
    strategies/expert.py moves each expert's bias by `step` against its load in the global batch.
    """

    def __init__(self, experts: int, *, step: float) -> None:
        super().__init__()
        self.step = step
        with torch.device("cpu"):  # a model is built on meta
            self.register_buffer("expert_bias", torch.zeros(experts))
            self.register_buffer("expert_load", torch.zeros(experts, dtype=torch.int64), persistent=False)

    expert_bias: Tensor
    expert_load: Tensor

    def count(self, counts: Tensor) -> None:
        """Add the `counts` [expert] of a training pass to the load. A recomputation discards its count.

        A pipeline learns its shapes from a pass in evaluation mode, with gradients.
        """
        if self.training and torch.is_grad_enabled():
            self.expert_load.add_(counts)  # `+=` would set an attribute, which compiled recomputation can't

    @torch.no_grad()
    def move(self, load: Tensor) -> None:
        """Move the bias against `load` [expert], int64: the tokens of each expert in the global batch."""
        self.expert_bias += self.step * (load.sum() - len(load) * load).sign()


class Reorder(torch.autograd.Function):
    """`rows[order // copies]` for a permutation `order`: each row appears `copies` times.

    The backward pass of torch's indexing sorts the indices on a GPU, because some may be equal. This class
    indexes the gradients with `inverse`, the inverse of `order`, instead.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor, copies: int = 1) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return rows[order if copies == 1 else order // copies]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        gradient = gradients[0][inverse]
        if ctx.copies > 1:
            gradient = gradient.view(-1 if len(gradient) else 0, ctx.copies, gradient.shape[-1]).sum(1)
        return gradient, None, None, None
