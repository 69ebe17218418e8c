"""BatchNorm over all devices that share a microbatch (Ioffe and Szegedy 2015), as one device would have it.

Data parallelism gives a device some of the samples, tiles some of the pixels. Statistics of a part would
make the result depend on the layout, so they are taken over all parts: a global microbatch of one device
and of many is normalised alike. Running statistics are then equal on all devices, without being sent.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.strategies.replace_forward import Forward, replace_forward
from hpc_parallel.torch_internals import BatchNorm, require_dims


def apply(model: LayeredModel, *, axis: DeviceMesh) -> LayeredModel:
    """Let every BatchNorm of `model` take its statistics over `axis`, which may join several axes."""
    for module in model.modules():
        if isinstance(module, BatchNorm):
            replace_forward(module, partial(forward, axis.get_group()), technique="Global")
    return model


def forward(group: dist.ProcessGroup, alone: Forward, norm: BatchNorm, x: Tensor) -> Tensor:
    """What `norm` does to `x` [batch, channel, ...], `x` being this rank's part of the microbatch."""
    require_dims(norm, x)
    if not norm.training and norm.running_mean is not None:
        return alone(norm, x)
    out, mean, variance, count = Normalise.apply(x, norm.weight, norm.bias, norm.eps, group)
    track(norm, mean=mean, variance=variance, count=count)
    return out  # type: ignore[no-any-return]


@torch.no_grad()
def track(norm: BatchNorm, *, mean: Tensor, variance: Tensor, count: Tensor) -> None:
    """Take the moments of a microbatch of `count` places into the running statistics, if there are any."""
    means, variances = norm.running_mean, norm.running_var
    if norm.training and means is not None and variances is not None:
        assert norm.num_batches_tracked is not None
        norm.num_batches_tracked.add_(1)
        tracked = norm.num_batches_tracked.to(means.dtype)
        share = tracked.reciprocal() if norm.momentum is None else norm.momentum
        means.lerp_(mean.to(means.dtype), share)
        variances.lerp_((variance * (count / (count - 1))).to(variances.dtype), share)  # unbiased


class Normalise(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) * weight + bias, both moments over all ranks of a group.

    Deviations are from the global mean, since sums of squares would cancel. The derivative is the
    paper's, its two means over the group too.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        dims = [dim for dim in range(x.dim()) if dim != 1]
        shape = [-1 if dim == 1 else 1 for dim in range(x.dim())]
        here = wide.new_tensor([x.numel() // x.shape[1]], dtype=torch.float64)
        totals = torch.cat([wide.sum(dims).double(), here])  # a float32 can't count all pixels
        dist.all_reduce(totals, group=group)
        mean, count = (totals[:-1] / totals[-1]).to(wide.dtype), totals[-1]
        centred = wide - mean.view(shape)
        squares = centred.square().sum(dims).double()
        dist.all_reduce(squares, group=group)
        variance = squares / count
        scale = torch.rsqrt(variance + eps).to(wide.dtype)
        normed = centred * scale.view(shape)
        out = normed if weight is None or bias is None else normed * weight.view(shape) + bias.view(shape)
        ctx.save_for_backward(x, weight, mean, scale, count)
        ctx.group = group
        ctx.mark_non_differentiable(mean, variance, count)
        return out.to(x.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale, count = ctx.saved_tensors
        dims = [dim for dim in range(x.dim()) if dim != 1]
        shape = [-1 if dim == 1 else 1 for dim in range(x.dim())]
        wide = gradient.to(mean.dtype)
        normed = (x.to(mean.dtype) - mean.view(shape)) * scale.view(shape)
        here = torch.stack([wide.sum(dims), (wide * normed).sum(dims)])  # the parameters' own gradients
        totals = here.to(torch.float64, copy=True)
        dist.all_reduce(totals, group=ctx.group)
        offset, slope = (totals / count).to(mean.dtype).unbind()
        factor = scale if weight is None else scale * weight
        inner = wide - offset.view(shape) - normed * slope.view(shape)
        grad_bias, grad_weight = (None, None) if weight is None else here.to(weight.dtype).unbind()
        return (inner * factor.view(shape)).to(x.dtype), grad_weight, grad_bias, None, None
