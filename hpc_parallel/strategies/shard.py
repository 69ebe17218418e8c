"""Sharded data parallelism: every device keeps a slice of each weight (ZeRO-3; Rajbhandari et al. 2020)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn import Module

from hpc_parallel import torch_internals
from hpc_parallel.config.schema import StrategyConfig
from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.strategies.expert import split_experts
from hpc_parallel.strategies.forward_backward import ForwardBackward
from hpc_parallel.strategies.gradients import used_anywhere
from hpc_parallel.strategies.precision import HALF
from hpc_parallel.torch_internals import slice_on


def apply(
    model: LayeredModel,
    *,
    mesh: DeviceMesh,
    options: StrategyConfig,
    precision: str,
    staged: bool = False,
    experts_mesh: DeviceMesh | None = None,
) -> LayeredModel:
    """Shard weights over the last axis of `mesh`; on a mesh of two axes the first holds replicas (HSDP).

    Blocks are gathered one at a time, so a device holds about two full blocks. Stem and head are separate
    groups; the head stays gathered between forward and backward. Parts that share a weight with another part
    are one group, which stays gathered too. A block that is used several times is gathered each time.
    Without `reshard`, all blocks stay gathered, so only gradients and optimizer state are sharded (ZeRO-2).
    In a `staged` model (a pipeline's stage), blocks also stay gathered between the microbatches of a step.
    With bfloat16 and float16, weights are gathered and used in that type; gradients are summed in float32.
    `experts_mesh`: slices the experts that an expert axis has split, instead of `mesh`.
    """
    mixed = precision in HALF
    policy = MixedPrecisionPolicy(
        param_dtype=HALF.get(precision), reduce_dtype=torch.float32 if mixed else None
    )
    reshard = options.reshard and not staged
    slices = None if experts_mesh is None else slice_on(experts_mesh, split_experts(model))
    for part in (model.head, model):
        if part is not None:
            part.register_forward_hook(_own_output)
    for part in _separate_parts(model):
        keeps = part is model.head or not reshard
        fully_shard(
            part, mesh=mesh, mp_policy=policy, reshard_after_forward=not keeps, shard_placement_fn=slices
        )
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False, shard_placement_fn=slices)
    if options.prefetch is not None:
        _prefetch(model, ahead=options.prefetch)
    return model


def _own_output(_: Module, inputs: object, output: Any) -> Any:
    """A view, such as a DTensor's part, becomes a tensor of its own, which a loss may change in place.

    That would drop the view's hook, by which FSDP2 gathers weights for the backward pass.
    """
    return output.clone() if isinstance(output, Tensor) and output._base is not None else output


def _separate_parts(model: LayeredModel) -> list[Module]:
    """The blocks, stem and head that have weights, except parts that share a weight with another part."""
    ends = [
        end for end in (model.stem, model.head) if end is not None and any(True for _ in end.parameters())
    ]
    parts = [*model.distinct_blocks, *ends]
    uses = Counter(id(weight) for part in parts for weight in part.parameters())
    return [part for part in parts if all(uses[id(weight)] == 1 for weight in part.parameters())]


def _prefetch(model: LayeredModel, *, ahead: int) -> None:
    """Gather the next `ahead` blocks while one is computed; a device then holds `ahead` more full blocks."""
    blocks: list[FSDPModule] = [block for block in model.distinct_blocks if isinstance(block, FSDPModule)]
    root = cast(FSDPModule, model)
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + ahead])
        previous = blocks[max(0, index - ahead) : index]
        block.set_modules_to_backward_prefetch(previous[::-1])
    root.set_modules_to_forward_prefetch(blocks[:ahead])
    root.set_modules_to_backward_prefetch(blocks[: -ahead - 1 : -1])


class UnusedWeights:
    """Lets ranks use different weights of `parts` in a step; those that no rank uses get no gradient.

    Without it, ranks would wait for gradients that another rank does not have. Each step adds an all-reduce
    of one number for each weight.
    """

    def __init__(self, inner: ForwardBackward, *, parts: Sequence[LayeredModel], axis: DeviceMesh) -> None:
        """`axis`: the ranks that hold the same weights or slices of them."""
        self._inner, self._axis = inner, axis
        self._gradients = [torch_internals.SlicedGradients(part) for part in parts]
        self.copies = inner.copies

    def train(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = self._inner.train(inputs, targets)
        for gradients in self._gradients:
            gradients.drop(used_anywhere(gradients.used(), axis=self._axis))
        return loss

    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self._inner.evaluate(inputs, targets)


def release(model: LayeredModel) -> None:
    """Free gathered weights: a forward pass without a backward pass keeps some of them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
