"""Sharded data parallelism: every device keeps a slice of each weight (ZeRO-3; Rajbhandari et al. 2020)."""

from __future__ import annotations

from typing import cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn import Module

from hpc_parallel.config.schema import StrategyConfig
from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.strategies.precision import HALF


def apply(
    model: LayeredModel, *, mesh: DeviceMesh, options: StrategyConfig, precision: str, staged: bool = False
) -> LayeredModel:
    """Shard weights over the last axis of `mesh`; on a mesh of two axes the first holds replicas (HSDP).

    Blocks are gathered one at a time, so a device holds about two full blocks. Stem and head are groups of
    their own, or one group if they share a weight; the head stays gathered between forward and backward.
    Without `reshard`, all blocks stay gathered, so only gradients and optimizer state are sharded (ZeRO-2).
    They also stay gathered in a `staged` model, a stage of a pipeline, between the microbatches of a step.
    With bfloat16 and float16, weights are gathered and used in that type; gradients are summed in float32.
    """
    mixed = precision in HALF
    policy = MixedPrecisionPolicy(
        param_dtype=HALF.get(precision), reduce_dtype=torch.float32 if mixed else None
    )
    reshard = options.reshard and not staged
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    for end in _separate_ends(model):
        keeps = end is model.head or not reshard
        fully_shard(end, mesh=mesh, mp_policy=policy, reshard_after_forward=not keeps)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    if options.prefetch is not None:
        _prefetch(model, ahead=options.prefetch)
    return model


def _separate_ends(model: LayeredModel) -> list[Module]:
    """Stem and head, if each has weights and none of them is shared by both."""
    ends = [end for end in (model.stem, model.head) if end is not None]
    weights = [{id(weight) for weight in end.parameters()} for end in ends]
    shared = len(ends) == 2 and not weights[0].isdisjoint(weights[1])
    return [] if shared else [end for end, ids in zip(ends, weights, strict=True) if ids]


def _prefetch(model: LayeredModel, *, ahead: int) -> None:
    """Gather the next `ahead` blocks while one is computed; a device holds as many more full blocks."""
    root, *blocks = (cast(FSDPModule, module) for module in (model, *model.blocks.values()))
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + ahead])
        previous = blocks[max(0, index - ahead) : index]
        block.set_modules_to_backward_prefetch(previous[::-1])
    root.set_modules_to_forward_prefetch(blocks[:ahead])
    root.set_modules_to_backward_prefetch(blocks[: -ahead - 1 : -1])


def release(model: LayeredModel) -> None:
    """Free gathered weights: a forward pass without a backward pass keeps some of them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
