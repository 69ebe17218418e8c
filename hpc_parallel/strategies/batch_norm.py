"""BatchNorm over all devices that share a microbatch (Ioffe and Szegedy 2015), with one device's result.

Data parallelism gives each device some of the samples, and tiles give it some of the pixels. Statistics of
one part would make the result depend on the layout, so they are taken over all parts of the global
microbatch. Running statistics are then equal on all devices without communication.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.strategies.mesh import name_of
from hpc_parallel.strategies.ranges import marked
from hpc_parallel.strategies.replace_forward import Forward, replace_forward
from hpc_parallel.torch_internals import BatchNorm, require_dims


def apply(model: LayeredModel, *, axis: DeviceMesh) -> LayeredModel:
    """Let every BatchNorm of `model` take its statistics over `axis`, which may join several axes."""
    for module in model.modules():
        if isinstance(module, BatchNorm):
            replace_forward(module, partial(forward, axis.get_group(), name_of(axis)), technique="Global")
    return model


def forward(group: dist.ProcessGroup, axis: str, original: Forward, norm: BatchNorm, x: Tensor) -> Tensor:
    """Normalise `x` [batch, channel, ...], this rank's part of the microbatch."""
    require_dims(norm, x)
    if not norm.training and norm.running_mean is not None:
        # Sliced weights are gathered in bfloat16, which no kernel combines with statistics in float32.
        dtype = norm.running_mean.dtype
        weight, bias = (None if value is None else value.to(dtype) for value in (norm.weight, norm.bias))
        return F.batch_norm(x, norm.running_mean, norm.running_var, weight, bias, eps=norm.eps)
    out, mean, variance, count = Normalise.apply(x, norm.weight, norm.bias, norm.eps, group, axis)
    track(norm, mean=mean, variance=variance, count=count)
    return out  # type: ignore[no-any-return]


@torch.no_grad()
def track(norm: BatchNorm, *, mean: Tensor, variance: Tensor, count: Tensor) -> None:
    """Update running statistics, if there are any, by a microbatch of `count` values for each channel."""
    if not (norm.training and norm.track_running_stats):
        return
    tracked = norm.num_batches_tracked
    if tracked is not None:
        tracked.add_(1)  # as torch does, also if a model has set its statistics to None
    means, variances = norm.running_mean, norm.running_var
    if means is not None and variances is not None:
        average = 0.0 if tracked is None else tracked.to(means.dtype).reciprocal()  # over all microbatches
        weight = average if norm.momentum is None else norm.momentum
        means.lerp_(mean.to(means.dtype), weight)
        variances.lerp_((variance * (count / (count - 1))).to(variances.dtype), weight)  # unbiased


def normalise(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, total: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(x - mean) / sqrt(variance + eps) * weight + bias of `x` [batch, channel, ...].

    total: sums a tensor over all parts of the microbatch. Returns the result, 1 / sqrt(variance + eps), and
    each channel's mean, variance and number of values. The variance sums squared deviations from the mean of
    all parts, because E[x^2] - E[x]^2 would cancel.
    """
    upcast = x.to(torch.promote_types(x.dtype, torch.float32))
    dims = [dim for dim in range(x.dim()) if dim != 1]
    shape = [-1 if dim == 1 else 1 for dim in range(x.dim())]
    local_count = upcast.new_full((1,), x.numel() // x.shape[1], dtype=torch.float64)
    totals = total(torch.cat([upcast.sum(dims).double(), local_count]))  # a float32 can't count all pixels
    mean, count = (totals[:-1] / totals[-1]).to(upcast.dtype), totals[-1]
    centred = upcast - mean.view(shape)
    variance = total(centred.square().sum(dims).double()) / count
    scale = torch.rsqrt(variance + eps).to(upcast.dtype)
    normed = centred * scale.view(shape)
    out = normed if weight is None else normed * weight.view(shape)
    out = out if bias is None else out + bias.view(shape)
    return out.to(x.dtype), scale, mean, variance, count


class Normalise(torch.autograd.Function):
    """BatchNorm with moments over all ranks of a group.

    The derivative is the paper's; its two means are also taken over the group.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        group: dist.ProcessGroup,
        axis: str,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        total = partial(sum_over, group=group, axis=axis)
        out, scale, mean, variance, count = normalise(x, weight, bias, eps, total)
        ctx.save_for_backward(x, weight, mean, scale, count)
        ctx.group, ctx.axis = group, axis
        ctx.mark_non_differentiable(mean, variance, count)
        return out, mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale, count = ctx.saved_tensors
        dims = [dim for dim in range(x.dim()) if dim != 1]
        shape = [-1 if dim == 1 else 1 for dim in range(x.dim())]
        upcast = gradient.to(mean.dtype)
        normed = (x.to(mean.dtype) - mean.view(shape)) * scale.view(shape)
        sums = torch.stack([upcast.sum(dims), (upcast * normed).sum(dims)])  # gradients of bias and weight
        totals = sum_over(sums.to(torch.float64, copy=True), group=ctx.group, axis=ctx.axis)
        offset, slope = (totals / count).to(mean.dtype).unbind()
        factor = scale if weight is None else scale * weight
        inner = upcast - offset.view(shape) - normed * slope.view(shape)
        sums = sums if weight is None else sums.to(weight.dtype)
        wanted = ctx.needs_input_grad[2], ctx.needs_input_grad[1]  # BatchNorm(bias=False) has a weight only
        grad_bias, grad_weight = (part if wants else None for part, wants in zip(sums, wanted, strict=True))
        return (inner * factor.view(shape)).to(x.dtype), grad_weight, grad_bias, None, None, None


def sum_over(values: Tensor, *, group: dist.ProcessGroup, axis: str) -> Tensor:
    with marked(f"all_reduce {axis}"):
        dist.all_reduce(values, group=group)
    return values
