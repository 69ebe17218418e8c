"""Compilation of each block by torch.compile (Ansel et al. 2024); blocks of one shape share the code."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from hpc_parallel.models.layered import LayeredModel

PASSES = 3  # a block is compiled for training, for evaluation and for a stage's first look at shapes


def apply(model: LayeredModel) -> LayeredModel:
    """Compile the forward pass of every block of `model`, whole; what wraps a block stays outside.

    Hooks on the block itself (fully_shard's) are so never compiled, and parameters keep their names.
    """
    # Blocks of different shapes are versions of one function to torch, which gives up after 8.
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, PASSES * len(model.blocks))
    for block in model.blocks.values():
        compiled = torch.compile(block.forward, fullgraph=True, dynamic=False)
        block.forward = partial(_of_plain_input, compiled)
    return model


def _of_plain_input(compiled: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A collective's result that is still under way (AsyncCollectiveTensor) is waited for by copying it:
    torch 2.13 would send its gradient past the step that made it a plain tensor."""
    return compiled(x if type(x) is Tensor else x.clone())
