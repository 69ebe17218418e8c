"""Activation checkpointing: a block keeps its input and is computed again for its backward pass (Chen et al. 2016).

`selective` also keeps what matrix products, convolutions, attention and sums over devices gave, as
torchtitan does, but of every product: a block's backward pass then repeats only what memory bounds, and
no sum goes over the network twice. What is gathered is gathered again, being as large as all devices' parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.nn import Module
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hpc_parallel.models.layered import LayeredModel

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_mm"}
SUMS = {"reduce_scatter_tensor", "all_reduce"}


def apply(model: LayeredModel, *, keeps: str, compiled: bool) -> LayeredModel:
    """Let every block of `model` keep nothing but its input (`full`), or its dear results too (`selective`).

    What recomputation does to buffers, such as running statistics, is dropped: it has been done. A
    compiler sees the block once and drops it by itself.
    """
    if keeps == "none":
        return model
    for block in model.blocks.values():
        contexts = partial(_contexts, block, selective=keeps == "selective", compiled=compiled)
        plain = keeps == "full" and (compiled or next(block.buffers(), None) is None)
        options = {} if plain else {"context_fn": contexts}
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)
    return model


def _contexts(
    block: Module, *, selective: bool, compiled: bool
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Around the forward pass and around the recomputation; a compiler takes none but torch's own."""
    first, again = (
        create_selective_checkpoint_contexts(_policy) if selective else (nullcontext(), nullcontext())
    )
    return first, again if compiled else _recomputing(block, again)


def _policy(_: object, operation: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    name = operation.overloadpacket.__name__ if isinstance(operation, torch._ops.OpOverload) else ""
    dear = name in PRODUCTS or name in SUMS or name.startswith("_scaled_dot_product_")
    return CheckpointPolicy.MUST_SAVE if dear else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def _recomputing(block: Module, inner: AbstractContextManager[Any]) -> Iterator[None]:
    """`inner` while `block` has copies for buffers, made before `inner` watches."""
    owners = [(module, name) for module in block.modules() for name in module._buffers]
    kept = [(module, name, module._buffers[name]) for module, name in owners]
    for module, name, buffer in kept:
        module._buffers[name] = None if buffer is None else buffer.clone()
    try:
        with inner:
            yield
    finally:
        for module, name, buffer in kept:
            module._buffers[name] = buffer
