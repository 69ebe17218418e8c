"""The blocks of each pipeline stage: by explicit cuts, or balanced over contiguous stages."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module

from hpc_parallel.config.part_costs import PartCosts
from hpc_parallel.config.schedules import schedule_of, stages_of, stages_per_rank
from hpc_parallel.config.schema import StrategyConfig
from hpc_parallel.config.stage_cuts import divide_blocks
from hpc_parallel.models.layered import LayeredModel, keep
from hpc_parallel.problems import ConfigError, Problems
from hpc_parallel.strategies.replace_forward import replace_forward
from hpc_parallel.torch_internals import is_view


def cut(
    model: LayeredModel, *, axis: DeviceMesh, sample_shape: tuple[int, ...], options: StrategyConfig
) -> dict[int, LayeredModel]:
    """The stages of the whole `model` that this rank of `axis` has, by their place in the pipeline, rising.

    Parameters keep the names of the whole model.

    Raises ConfigError as `divide` does.
    """
    per_rank = stages_per_rank(options)
    count = axis.size() * per_rank
    blocks = divide(model, stages=count, sample_shape=sample_shape, options=options)
    local_indices = stages_of(
        axis.get_local_rank(),
        degree=axis.size(),
        per_rank=per_rank,
        v_shaped=schedule_of(options).v_shaped,
    )
    stages = {
        i: keep(deepcopy(model), blocks=blocks[i], stem=i == 0, head=i == count - 1) for i in local_indices
    }
    for stage in stages.values():
        replace_forward(stage, contiguous_ends, technique="Stage")
    return stages


def contiguous_ends(forward: Callable[..., Any], stage: LayeredModel, *inputs: Tensor) -> Any:
    """The forward pass of a stage whose outputs, and whose inputs' gradients, can be sent.

    torch's pipelines send tensors as they are, and backends send contiguous ones only. A schedule that splits
    the backward pass detaches outputs in place, which views do not allow: an input that a stage only hands on
    is copied.
    """
    outputs = forward(stage, *(ContiguousGradient.apply(x) if x.requires_grad else x for x in inputs))
    if isinstance(outputs, tuple):
        return tuple(map(_sendable, outputs))
    return _sendable(outputs)


def _sendable(output: Tensor) -> Tensor:
    return output.clone(memory_format=torch.contiguous_format) if is_view(output) else output.contiguous()


class ContiguousGradient(torch.autograd.Function):
    """The same tensor; its gradient is contiguous.

    An input that a stage hands on is also no longer a leaf of autograd, which would have no gradient to give.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


def find_problems(
    model: LayeredModel, *, stages: int, sample_shape: tuple[int, ...], options: StrategyConfig
) -> Problems:
    """Returns why the whole `model` can't be cut into `stages`."""
    try:
        divide(model, stages=stages, sample_shape=sample_shape, options=options)
    except ConfigError as error:
        yield from error.problems


def divide(
    model: LayeredModel, *, stages: int, sample_shape: tuple[int, ...], options: StrategyConfig
) -> list[range]:
    """The blocks of each stage, in order, by `strategy.cuts`, or by `strategy.balance` and `strategy.shares`.

    Raises ConfigError if the model has too few blocks, which is known only after the model is built.
    """
    by_parameters = options.balance == "parameters"
    costs = parameters(model) if by_parameters else model.forward_flops(sample_shape)
    return divide_blocks(costs, stages=stages, options=options)


def parameters(model: LayeredModel) -> PartCosts:
    """Parameters of each part. A weight that stem and head share counts twice: each end has a copy."""

    def count(part: Module | None) -> int:
        return 0 if part is None else sum(weight.numel() for weight in part.parameters())

    return PartCosts(
        stem=count(model.stem),
        blocks=tuple(count(block) for block in model.blocks.values()),
        head=count(model.head),
    )
