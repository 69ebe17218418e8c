"""Tensor parallelism: single layers split over devices by the model's hints (Shoeybi et al. 2019, Megatron).

Between layers each device keeps its slice of the sequence (Korthikanti et al. 2022), and the loss is
taken of logits that stay split by vocabulary (`loss_of_slices`); each is a switch of its own.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.func import functional_call
from torch.nn import Module, Parameter

from hpc_parallel.config.schema import StrategyConfig
from hpc_parallel.models.layered import LayeredModel, Loss
from hpc_parallel.problems import ConfigError, Problem
from hpc_parallel.strategies.replace_forward import Forward, replace_forward
from hpc_parallel.torch_internals import LayerStyle


def apply(model: LayeredModel, *, axis: DeviceMesh, options: StrategyConfig) -> LayeredModel:
    """Make every weight of `model` a DTensor on `axis`, split as `model.tensor_roles` says.

    Raises ConfigError where the hints leave a weight out: whether its gradient is whole on a device
    or a part of a sum is then unknown.
    """
    styles = _styles(options)
    for name, module in list(model.named_modules()):
        for pattern, role in model.tensor_roles.items():
            if _matches(name, pattern):
                parallelize_module(module, axis, styles[role], src_data_rank=None)
    for alias, name in model.tied.items():  # splitting parted them
        weights = dict(model.named_parameters())
        if alias in weights and name in weights:
            path, _, leaf = alias.rpartition(".")
            setattr(model.get_submodule(path), leaf, weights[name])
    if left_out := [name for name, weight in model.named_parameters() if not isinstance(weight, DTensor)]:
        rule = f"can't be: {type(model).__name__}.tensor_roles says nothing of {', '.join(left_out[:3])}"
        raise ConfigError([Problem("strategy.tensor", axis.size(), rule, (1,))])
    return model


def _matches(name: str, pattern: str) -> bool:
    """Part by part: a `*` stands for one name between dots, so a block's pattern is not of what is in it."""
    names, patterns = name.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


def _styles(options: StrategyConfig) -> dict[str, ParallelStyle]:
    """What each role of `LayeredModel.tensor_roles` means; activations are `[batch, seq, dim]`,
    or of any shape and whole on every device where a model's roles are `alike` and `classes`."""
    between: Placement = Shard(1) if options.sequence_parallel else Replicate()
    logits: Placement = Shard(-1) if options.loss_parallel else Replicate()
    return {
        "vocabulary": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        # Handed on as a DTensor, so that the gradients of all layers that read it are summed once.
        "whole": PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate()),
        "column": ColwiseParallel(),
        "row": RowwiseParallel(output_layouts=between),
        "position": EachPosition(between),
        "heads": EachPosition(Shard(2)),
        "logits": ColwiseParallel(input_layouts=between, output_layouts=logits),
        "alike": Alike(),
        "classes": ColwiseParallel(input_layouts=Replicate(), output_layouts=logits),
    }


class EachPosition(LayerStyle):
    """A layer that treats positions or heads alone, such as a norm: weights whole, its input where it is."""

    def __init__(self, between: Placement) -> None:
        self._between = between

    def split(self, module: Module, mesh: DeviceMesh) -> Module:
        def enter(_: Module, inputs: tuple[Tensor], mesh: DeviceMesh) -> DTensor:
            return DTensor.from_local(inputs[0], mesh, [self._between], run_check=False)

        def leave(_: Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
            return output.to_local()

        return distribute_module(module, mesh, None, enter, leave)  # type: ignore[arg-type]


class Alike(LayerStyle):
    """A module that every device computes whole, from the same input: so is each weight's gradient.

    Its weights are distributed tensors only to those who hold them; it computes with plain ones, which any
    layer can, and autograd gives each back its gradient as whole, not as a part of a sum.
    """

    def split(self, module: Module, mesh: DeviceMesh) -> Module:
        for part in module.modules():
            for name, weight in part.named_parameters(recurse=False):
                whole = DTensor.from_local(weight, mesh, [Replicate()], run_check=False)
                setattr(part, name, Parameter(whole.detach(), requires_grad=weight.requires_grad))
        replace_forward(module, partial(_with_plain_weights, _AsBefore(module)), technique="Alike")
        return module


class _AsBefore(Module):
    """`module` with the forward pass that it had, since functional_call would come back to the new one."""

    def __init__(self, module: Module) -> None:
        super().__init__()
        self.module = module
        self._forward: Forward = type(module).forward

    def forward(self, *inputs: Any) -> Tensor:
        return self._forward(self.module, *inputs)


def _with_plain_weights(as_before: _AsBefore, _: Forward, __: Module, *inputs: Any) -> Tensor:
    # Asked anew each time: fully_shard puts another object in a weight's place.
    weights = as_before.named_parameters()
    plain = {name: weight.to_local() for name, weight in weights if isinstance(weight, DTensor)}
    return functional_call(as_before, plain, inputs)  # type: ignore[no-any-return]


def loss_of_slices(loss: Loss, *, axis: DeviceMesh) -> Loss:
    """`loss`, taken of logits that stay split over `axis` by their last dim."""

    def split_loss(output: Tensor, target: Tensor) -> Tensor:
        value = loss(DTensor.from_local(output, axis, [Shard(-1)], run_check=False), target)
        return value.full_tensor() if isinstance(value, DTensor) else value

    return split_loss
