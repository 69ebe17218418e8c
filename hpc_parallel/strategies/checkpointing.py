"""Activation checkpointing: blocks keep their input and run again for the backward pass (Chen et al. 2016).

`selective` keeps the results of matrix products, convolutions, attention and sums over devices too.
torchtitan keeps every second product; here it is every one, so that nothing is repeated but what memory
bounds, and no sum goes over the network twice. What was gathered is gathered again: that is large.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.problems import ConfigError, Problem
from hpc_parallel.strategies.replace_forward import Forward, replace_forward
from hpc_parallel.torch_internals import buffers_of, tree_leaves, written_arguments

DEAR = {
    "mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "convolution",
    "reduce_scatter_tensor", "all_reduce",
}  # fmt: skip
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def apply(model: LayeredModel, *, keeps: str, compiled: bool) -> LayeredModel:
    """Let every block of `model` keep nothing but its input (`full`), or its dear results too (`selective`).

    `compiled`: whether a compiler will read the blocks; the repeating is then its work.
    """
    if keeps != "none":
        way = partial(run_now_and_again, keeps == "selective", compiled)
        for block in model.blocks.values():
            replace_forward(block, way, technique="Checkpointed")
    return model


def run_now_and_again(
    selective: bool, compiled: bool, forward: Forward, block: Module, *inputs: Tensor
) -> Tensor:
    contexts: Callable[[], Contexts] = noop_context_fn
    if not compiled:
        contexts = partial(now_and_again, selective, block)
    elif selective:  # of contexts of our own a compiler takes none
        contexts = partial(create_selective_checkpoint_contexts, keep_dear)
    return checkpoint(  # type: ignore[no-any-return]
        partial(forward, block), *inputs, use_reentrant=False, context_fn=contexts
    )


def now_and_again(selective: bool, block: Module) -> Contexts:
    """Around the forward pass, and around its repetition."""
    now: AbstractContextManager[Any] = nullcontext()
    again: AbstractContextManager[Any] = nullcontext()
    if selective:
        now, again = create_selective_checkpoint_contexts(KeepUnwritten())
    return now, WithCopiesOfBuffers(block, again)


def keep_dear(_: object, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    """What a custom autograd function computes is left to it: gradients are off there, and its
    operations write into each other's results."""
    name = operation.name().partition("::")[2].partition(".")[0]
    dear = name in DEAR or name.startswith("_scaled_dot_product_")
    keep = dear and torch.is_grad_enabled()
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


class KeepUnwritten:
    """`keep_dear` for one pass through a block, seeing that nothing is written into what it has kept.

    torch sees that by itself, but not through the view that a product of more than two dims returns.
    """

    def __init__(self) -> None:
        self._kept: set[int] = set()

    def __call__(self, context: Any, operation: Any, *inputs: Any, **named: Any) -> CheckpointPolicy:
        """Raises ConfigError where the block writes into a kept result."""
        if not self._kept.isdisjoint(memory_of(written_arguments(operation, inputs))):
            rule = f"keeps a result that the block then overwrites ({operation.name()})"
            key = "training.activation_checkpointing"
            raise ConfigError([Problem(key, "selective", rule, ("full", "none"))])
        found = keep_dear(context, operation)
        if found is CheckpointPolicy.MUST_SAVE:
            self._kept.update(memory_of(context.op_output))
        return found


def memory_of(tensors: Any) -> list[int]:
    """Addresses of the plain tensors among `tensors`."""
    return [t.untyped_storage().data_ptr() for t in tree_leaves(tensors) if type(t) is Tensor]


class WithCopiesOfBuffers:
    """`inner`, in which what `block` writes into buffers is lost: running statistics were written before.

    Entered for each backward pass through the block, and a zero-bubble schedule makes two.
    """

    def __init__(self, block: Module, inner: AbstractContextManager[Any]) -> None:
        self._tables = [buffers_of(module) for module in block.modules()]
        self._inner = inner
        self._kept: list[dict[str, Tensor | None]] = []

    def __enter__(self) -> None:
        self._kept = [dict(table) for table in self._tables]
        for table in self._tables:
            copies = {name: None if buffer is None else buffer.clone() for name, buffer in table.items()}
            table.update(copies)
        self._inner.__enter__()  # here: it refuses operations that the forward pass did not have

    def __exit__(self, *failure: Any) -> None:
        try:
            self._inner.__exit__(*failure)
        finally:
            for table, buffers in zip(self._tables, self._kept, strict=True):
                table.update(buffers)
