"""Sharded data parallelism: every device keeps a slice of each weight (ZeRO-3; Rajbhandari et al. 2020)."""

from __future__ import annotations

from typing import cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from hpc_parallel.config.schema import StrategyConfig
from hpc_parallel.models.layered import LayeredModel


def apply(model: LayeredModel, *, mesh: DeviceMesh, options: StrategyConfig, precision: str) -> LayeredModel:
    """Slice the weights over the last axis of `mesh`; on a mesh of two axes the first holds replicas (HSDP).

    Blocks are gathered one at a time, so about two whole blocks live on a device. The head is one group
    with the stem, which it may share a weight with, and stays gathered between forward and backward.
    Without `reshard` all of them stay so: only gradients and optimizer state are sliced then (ZeRO-2).
    Under bfloat16 weights are gathered and used in bfloat16, gradients are summed in float32.
    """
    coarse = precision == "bfloat16"
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if coarse else None, reduce_dtype=torch.float32 if coarse else None
    )
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=options.reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    if options.prefetch is not None:
        _prefetch(model, ahead=options.prefetch)
    return model


def _prefetch(model: LayeredModel, *, ahead: int) -> None:
    """Begin to gather the next `ahead` blocks while one is computed; as many more are whole at a time."""
    root, *blocks = (cast(FSDPModule, module) for module in (model, *model.blocks.values()))
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + ahead])
        before = blocks[max(0, index - ahead) : index]
        block.set_modules_to_backward_prefetch(before[::-1])
    root.set_modules_to_forward_prefetch(blocks[:ahead])
    root.set_modules_to_backward_prefetch(blocks[: -ahead - 1 : -1])


def release(model: LayeredModel) -> None:
    """Leave the slices only: a pass without a backward one keeps some weights gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
