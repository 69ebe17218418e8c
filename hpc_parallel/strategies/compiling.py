"""Compilation of each block by torch.compile (Ansel et al. 2024); blocks of one shape share the code."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.strategies.replace_forward import Forward, replace_forward
from hpc_parallel.torch_internals import allow_recompiles

SHAPES = 64  # of input that a block may meet: microbatches in training, in each batch size of inference


def apply(model: LayeredModel) -> LayeredModel:
    """Compile the forward pass of every block of `model`, whole; what wraps a block stays outside.

    Hooks on the block itself (fully_shard's) are so never compiled, and parameters keep their names.
    """
    allow_recompiles(SHAPES * len(model.blocks))
    run = partial(run_compiled, cache(partial(torch.compile, fullgraph=True, dynamic=False)))
    for block in model.blocks.values():
        replace_forward(block, run, technique="Compiled")
    return model


def run_compiled(compiled: Any, forward: Forward, block: Module, x: Tensor) -> Tensor:
    """A collective's result that is still under way (AsyncCollectiveTensor) is waited for by copying it:
    torch 2.13 would send its gradient past the operation that made it a plain tensor."""
    return compiled(forward)(block, x if type(x) is Tensor else x.clone())  # type: ignore[no-any-return]
