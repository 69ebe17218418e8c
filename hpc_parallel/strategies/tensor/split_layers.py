"""Tensor parallelism: layers split over devices by the model's hints (Megatron; Shoeybi et al. 2019).

With `sequence_parallel`, each device keeps a slice of the sequence between layers (Korthikanti et al. 2022).
With `loss_parallel`, the loss is computed from logits that stay split by vocabulary (`loss_of_slices`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.func import functional_call
from torch.nn import Embedding, Module, Parameter
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hpc_parallel.config.schema import StrategyConfig
from hpc_parallel.data.packing import IGNORED
from hpc_parallel.models.attention import Attention
from hpc_parallel.models.auxiliary_loss import auxiliary_losses
from hpc_parallel.models.experts import width_dim
from hpc_parallel.models.layered import Column, LayeredModel, Loss
from hpc_parallel.strategies.loss import MetricsOf
from hpc_parallel.strategies.mesh import all_reduce
from hpc_parallel.strategies.replace_forward import Forward, OriginalForward, replace_forward
from hpc_parallel.strategies.tensor.tensor_roles import is_within, roles_of
from hpc_parallel.torch_internals import LayerStyle, concatenate, require_below


def apply(
    model: LayeredModel, *, axis: DeviceMesh, options: StrategyConfig, chunked: str | None = None
) -> LayeredModel:
    """Make every weight of `model` (or a stage of it) a DTensor on `axis`, as `model.tensor_roles` says.

    `chunked`: the name of the projection whose logits the loss computes (chunked_loss.py).
    `tensor_roles.find_problems` must have found nothing.
    """
    styles = _styles(options)
    for name, role in roles_of(model).items():
        style = FusedColumn(role) if isinstance(role, Column) else styles[role]
        style = ChunkedLogits(between_layers(options)) if name == chunked else style
        layer = model.get_submodule(name)
        if role == "vocabulary":
            layer.register_forward_pre_hook(require_tokens)
        parallelize_module(layer, axis, style, src_data_rank=None)
    for attention in attentions_of_slices(model):
        attention.local_bias = partial(local_bias, axis)
    for alias, name in model.tied.items():  # splitting makes them two parameters
        weights = dict(model.named_parameters())
        if alias in weights and name in weights:
            path, _, leaf = alias.rpartition(".")
            setattr(model.get_submodule(path), leaf, weights[name])
    return model


def require_tokens(table: Module, inputs: tuple[Tensor, ...]) -> None:
    assert isinstance(table, Embedding)
    require_below(table.num_embeddings, inputs[0], what="a token")


def _styles(options: StrategyConfig) -> dict[str, ParallelStyle]:
    """The style of each role of `LayeredModel.tensor_roles`.

    Activations are `[batch, seq, dim]`. For the roles `alike` and `classes` they have any shape and are whole
    on every device.
    """
    between = between_layers(options)
    logits: Placement = Shard(-1) if options.loss_parallel else Replicate()
    return {
        "vocabulary": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        # The output stays a DTensor, so the gradients of all layers that read it are summed once.
        "whole": PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate()),
        "column": ColwiseParallel(),
        "row": RowwiseParallel(output_layouts=between),
        "position": EachPosition(between),
        "position_table": PositionTable(between),
        "heads": EachPosition(Shard(2)),
        "logits": ColwiseParallel(input_layouts=between, output_layouts=logits),
        "alike": Alike(),
        "experts": SplitExperts(between),
        "classes": ColwiseParallel(input_layouts=Replicate(), output_layouts=logits),
    }


def between_layers(options: StrategyConfig) -> Placement:
    """The placement of activations [batch, seq, dim] between layers."""
    return Shard(1) if options.sequence_parallel else Replicate()


class ChunkedLogits(LayerStyle):
    """A projection that is split by rows of its weight. The loss computes its logits.

    Each device uses all positions of the input. The gradient of the input is a partial sum, because each
    device computes it from its own rows only.
    """

    def __init__(self, between: Placement) -> None:
        self._between = between

    def split(self, module: Module, mesh: DeviceMesh) -> Module:
        def rows(_: str, part: Module, mesh: DeviceMesh) -> None:
            for name, weight in part.named_parameters(recurse=False):
                setattr(
                    part, name, Parameter(distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None))
                )

        def enter(_: Module, inputs: tuple[Tensor], mesh: DeviceMesh) -> Tensor:
            x = DTensor.from_local(inputs[0], mesh, [self._between], run_check=False)
            return x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

        return distribute_module(module, mesh, rows, enter)  # type: ignore[arg-type]


class EachPosition(LayerStyle):
    """A layer that treats each position or head separately, such as a norm.

    Its weights are whole on every device; its input keeps its placement.
    """

    def __init__(self, between: Placement) -> None:
        self._between = between

    def split(self, module: Module, mesh: DeviceMesh) -> Module:
        def enter(_: Module, inputs: tuple[Tensor], mesh: DeviceMesh) -> DTensor:
            (x,) = inputs
            if isinstance(x, DTensor):  # in a module of the role `whole`, which has all positions
                return x
            return DTensor.from_local(x, mesh, [self._between], run_check=False)

        def leave(_: Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
            return output.to_local()

        return distribute_module(module, mesh, None, enter, leave)  # type: ignore[arg-type]


class PositionTable(LayerStyle):
    """An embedding of positions: indices [..., seq] -> this device's slice of [..., seq, dim]."""

    def __init__(self, between: Placement) -> None:
        self._between = Shard(-2) if between.is_shard() else between

    def split(self, module: Module, mesh: DeviceMesh) -> Module:
        def enter(_: Module, inputs: tuple[Tensor], mesh: DeviceMesh) -> DTensor:
            return DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False)

        def leave(_: Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
            return output.redistribute(placements=[self._between]).to_local()

        return distribute_module(module, mesh, None, enter, leave)  # type: ignore[arg-type]


class FusedColumn(LayerStyle):
    """A linear layer of several projections: this device computes its columns of each of them.

    The gradient of the layer's weights is a partial sum, like the gradient of a norm's weights.
    """

    def __init__(self, role: Column) -> None:
        self._parts = role.parts

    def split(self, module: Module, mesh: DeviceMesh) -> Module:
        def columns(weight: Any) -> Tensor:
            full: Tensor = weight.to_local(grad_placements=[Partial()])
            parts: Tensor = full.unflatten(0, (self._parts, -1)).chunk(mesh.size(), dim=1)[
                mesh.get_local_rank()
            ]
            return parts.flatten(0, 1)

        def forward(_: Forward, linear: Module, x: Tensor) -> Tensor:
            inputs = (
                x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()], run_check=False)
            )
            bias = None if linear.bias is None else columns(linear.bias)
            return F.linear(inputs.to_local(grad_placements=[Partial()]), columns(linear.weight), bias)

        replicated = distribute_module(module, mesh)
        replace_forward(replicated, forward, technique="Fused")
        return replicated


class Alike(LayerStyle):
    """A module that every device computes fully from the same input, so every device has its full gradients.

    Its parameters are DTensors, as everywhere in the model. Its forward pass uses plain tensors, which every
    layer supports, and autograd returns full gradients instead of partial sums.
    """

    def split(self, module: Module, mesh: DeviceMesh) -> Module:
        for part in module.modules():
            for name, weight in part.named_parameters(recurse=False):
                replicated = DTensor.from_local(weight, mesh, [Replicate()], run_check=False)
                setattr(part, name, Parameter(replicated.detach(), requires_grad=weight.requires_grad))
        replace_forward(module, partial(_with_plain_weights, OriginalForward(module)), technique="Alike")
        return module


class SplitExperts(LayerStyle):
    """A router with experts, each of which is split by its inner width, as a feed-forward network is.

    Every device routes all tokens in the same way, and its output is a partial sum. So are the gradients of
    the input and of the router, which every device has whole. A mixture's auxiliary loss is the same on all
    devices, so each adds a part of its gradient.
    """

    def __init__(self, between: Placement) -> None:
        self._between = between

    def split(self, module: Module, mesh: DeviceMesh) -> Module:
        for part in module.modules():
            for name, weight in list(part.named_parameters(recurse=False)):
                setattr(part, name, _on_tensor_axis(weight, mesh, width_dim(part, name)))
        for auxiliary in auxiliary_losses([module]):
            auxiliary.copies = mesh.size()
        original = OriginalForward(module)

        def forward(_: Forward, __: Module, x: Tensor) -> Tensor:
            whole = DTensor.from_local(x, mesh, [self._between], run_check=False)
            tokens = whole.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
            # The weights on two axes become plain in expert.py.
            plain = {
                name: _partial(weight)
                for name, weight in original.named_parameters()
                if isinstance(weight, DTensor) and weight.device_mesh.ndim == 1
            }
            sums = DTensor.from_local(
                functional_call(original, plain, (tokens,)), mesh, [Partial()], run_check=False
            )
            return sums.redistribute(placements=[self._between]).to_local()

        replace_forward(module, forward, technique="Split")
        return module


def _on_tensor_axis(weight: Parameter, axis: DeviceMesh, dim: int | None) -> Parameter:
    """This device's part of `weight` along `dim` (None: all of it), which an expert axis may have split."""
    local, mesh = weight.detach(), axis
    before: tuple[Placement, ...] = ()
    if isinstance(local, DTensor):
        mesh, before = concatenate([local.device_mesh, axis]), tuple(local.placements)
        local = local.to_local()
    if dim is not None:
        local = local.chunk(axis.size(), dim=dim)[axis.get_local_rank()].contiguous()
    placements = [*before, Replicate() if dim is None else Shard(dim)]
    split = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )
    return Parameter(split, requires_grad=weight.requires_grad)


def _partial(weight: DTensor) -> Tensor:
    """The local part of a weight; the gradient of a whole weight is a partial sum."""
    (placement,) = weight.placements
    return weight.to_local(grad_placements=[Partial() if placement.is_replicate() else placement])


def _with_plain_weights(original: OriginalForward, _: Forward, __: Module, *inputs: Any) -> Tensor:
    # Read in every call, because fully_shard replaces the parameter objects.
    weights = original.named_parameters()
    plain = {
        name: OwnGradient.apply(weight.to_local()) for name, weight in weights if isinstance(weight, DTensor)
    }
    return functional_call(original, plain, tuple(map(_full, inputs)))  # type: ignore[no-any-return]


def _full(x: Any) -> Any:
    """`x` as a plain, whole tensor. In a module of the role `whole`, layers get DTensors."""
    return x.redistribute(placements=[Replicate()]).to_local() if isinstance(x, DTensor) else x


class OwnGradient(torch.autograd.Function):
    """Returns its input; its gradient has memory of its own.

    autograd gives both terms of `p + q` the same gradient tensor, and copies it before it adds another
    gradient. It does not see that the two DTensors around it share the memory. Without the copy here, a
    second microbatch would add the gradients of both weights to both.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].clone()


def attentions_of_slices(model: LayeredModel) -> list[Attention]:
    """The attentions of `model` whose heads are split: those in no module that a device computes fully."""
    owners = {name for name, role in roles_of(model).items() if role != "whole"}
    return [
        module
        for name, module in model.named_modules()
        if isinstance(module, Attention) and not is_within(name, owners)
    ]


def local_bias(axis: DeviceMesh, bias: Tensor, heads: int) -> Tensor:
    """This device's part of `bias` [heads or 1, q, k], for `heads` heads of each device."""
    if bias.dim() != 3 or len(bias) not in (1, heads * axis.size()):
        return bias
    part: Tensor = LocalBias.apply(bias, axis)
    return part


class LocalBias(torch.autograd.Function):
    """This device's heads of a bias that every device computes fully. Its gradient is that of all heads.

    Weights of the bias therefore have their full gradient on every device, as the role `alike` needs.
    """

    @staticmethod
    def forward(ctx: Any, bias: Tensor, axis: DeviceMesh) -> Tensor:
        ctx.axis, ctx.heads = axis, len(bias)
        return bias.view_as(bias) if len(bias) == 1 else bias.chunk(axis.size())[axis.get_local_rank()]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (local,) = gradients
        if ctx.heads == 1:
            full = local.clone(memory_format=torch.contiguous_format)
        else:
            full = local.new_zeros(ctx.heads, *local.shape[1:])
            full.chunk(ctx.axis.size())[ctx.axis.get_local_rank()].copy_(local)
        return all_reduce(full, axis=ctx.axis), None


class KnownClasses(TorchFunctionMode):
    """Each cross-entropy of split logits gets targets that are among the classes."""

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in (F.cross_entropy, F.nll_loss):
            logits, target = args[0], args[1] if len(args) > 1 else kwargs["target"]
            if isinstance(logits, DTensor) and not target.is_floating_point():
                known = target.masked_fill(target == kwargs.get("ignore_index", IGNORED), 0)
                require_below(logits.shape[1 if logits.dim() > 1 else 0], known, what="a target")
        return function(*args, **kwargs)


def loss_of_slices(loss: Loss, *, axis: DeviceMesh) -> Loss:
    """Returns `loss` for logits that stay split over `axis` by their last dim."""

    def split_loss(output: Tensor, target: Tensor) -> Tensor:
        with KnownClasses():
            value = loss(DTensor.from_local(output, axis, [Shard(-1)], run_check=False), target)
        return value.full_tensor() if isinstance(value, DTensor) else value

    return split_loss


def metrics_of_slices(metrics: MetricsOf, *, axis: DeviceMesh) -> MetricsOf:
    """Returns `metrics` for logits that are split over `axis` by their last dim; it gathers the logits."""

    def gathered_metrics(output: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        return metrics(DTensor.from_local(output, axis, [Shard(-1)], run_check=False).full_tensor(), target)

    return gathered_metrics
