"""Activation checkpointing: blocks keep their input and run again for the backward pass (Chen et al. 2016).

`selective` also keeps the results of matrix products, convolutions, attention, and of all that devices send
each other. torchtitan keeps every second matrix product, and gathers slices of a sequence again. This module
keeps every result: only memory-bound operations are repeated, and nothing goes over the network twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hpc_parallel.layout.step_facts import selective_problem
from hpc_parallel.models.layered import STATISTICS, LayeredModel, SampleIndices
from hpc_parallel.problems import ConfigError, Problem
from hpc_parallel.strategies.replace_forward import Forward, replace_forward
from hpc_parallel.torch_internals import buffers_of, tree_leaves, version_of, written_arguments

EXPENSIVE = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "convolution"}
# These operations return what devices exchange or compute from it, counts on the host, products in float8,
# and what compiled code has of experts' products. No operation overwrites these results, not even inside a
# custom autograd function, as DTensor's.
KEPT_EVERYWHERE = {
    "_scaled_mm", "scaled_product", "scaled_product_of_groups", "product_of_groups",
    "all_to_all_single", "exchange_counts", "wait_for_copy", "exchange_rows", "sequence_attention",
    "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce",
}  # fmt: skip
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def apply(model: LayeredModel, *, keeps: str, compiled: bool) -> LayeredModel:
    """Let every block of `model` keep only its input (`full`), or its expensive results too (`selective`).

    `compiled`: whether torch.compile compiles the blocks. The compiler then does the recomputation.
    """
    if keeps == "selective" and (problem := selective_problem()):
        raise ConfigError([problem])
    if keeps != "none":
        checkpointed = partial(checkpointed_forward, keeps == "selective", compiled, model.sample_indices)
        for block in model.distinct_blocks:
            replace_forward(block, checkpointed, technique="Checkpointed")
    return model


def checkpointed_forward(
    selective: bool,
    compiled: bool,
    samples: SampleIndices,
    forward: Forward,
    block: Module,
    *inputs: Tensor,
) -> Tensor:
    options: dict[str, Any] = {}
    if not compiled:
        options = {"context_fn": partial(pass_contexts, selective, samples, block)}
    elif selective:  # torch.compile accepts torch's contexts only
        options = {"context_fn": partial(create_selective_checkpoint_contexts, keep_expensive)}
    return checkpoint(partial(forward, block), *inputs, use_reentrant=False, **options)  # type: ignore[no-any-return]


def pass_contexts(selective: bool, samples: SampleIndices, block: Module) -> Contexts:
    """The contexts of the forward pass and of its recomputation."""
    forward: AbstractContextManager[Any] = nullcontext()
    recomputation: AbstractContextManager[Any] = nullcontext()
    if selective:
        forward, recomputation = create_selective_checkpoint_contexts(KeepUnwritten())
    keeps = "selective" if selective else "full"
    return forward, AsInForward(block, samples, recomputation, keeps=keeps)


def keep_expensive(_: object, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    """Keep the results of expensive operations; inside a custom autograd function, only KEPT_EVERYWHERE.

    Inside such a function gradients are off, and operations write into each other's results.
    """
    name = operation.name().partition("::")[2].partition(".")[0]
    expensive = name in EXPENSIVE or name.startswith("_scaled_dot_product_")
    keep = name in KEPT_EVERYWHERE or (expensive and torch.is_grad_enabled())
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


class KeepUnwritten:
    """`keep_expensive` for one pass through a block, with a check that no kept result is overwritten.

    torch checks this too, but not for views, and a matrix product of more than two dims returns one.
    """

    def __init__(self) -> None:
        self._kept: set[int] = set()

    def __call__(self, context: Any, operation: Any, *inputs: Any, **named: Any) -> CheckpointPolicy:
        """Raises ConfigError if the block writes into a kept result."""
        if not self._kept.isdisjoint(memory_of(written_arguments(operation, inputs))):
            rule = f"keeps a result that the block then overwrites ({operation.name()})"
            key = "training.activation_checkpointing"
            raise ConfigError([Problem(key, "selective", rule, ("full", "none"))])
        policy = keep_expensive(context, operation)
        if policy is CheckpointPolicy.MUST_SAVE:
            self._kept.update(memory_of(context.op_output))
        return policy


def memory_of(tensors: Any) -> list[int]:
    """Addresses of the plain tensors among `tensors`, without empty ones, which all have the same address."""
    storages = [tensor.untyped_storage() for tensor in tree_leaves(tensors) if type(tensor) is Tensor]
    return [storage.data_ptr() for storage in storages if storage.nbytes()]


class AsInForward:
    """The context `inner` for the recomputation of a forward pass. Create it during that forward pass.

    Dropouts draw for the samples of that pass. Writes into the buffers of `block` are discarded, because
    the forward pass has already updated running statistics. A zero-bubble schedule enters this context
    twice, because it makes two backward passes through a block.
    """

    def __init__(
        self, block: Module, samples: SampleIndices, inner: AbstractContextManager[Any], *, keeps: str
    ) -> None:
        self._block, self._keeps = block, keeps
        self._tables = [buffers_of(module) for module in block.modules()]
        self._versions = versions_of(block)
        self._samples, self._microbatch = samples, samples.current()
        self._inner = inner
        self._kept: list[dict[str, Tensor | None]] = []

    def __enter__(self) -> None:
        """Raises ConfigError if the block would see another value of a buffer than in the forward pass."""
        if clause := written_since(self._block, self._versions):
            rule = f"can't be used: {clause}, and is computed again from its later value"
            raise ConfigError([Problem("training.activation_checkpointing", self._keeps, rule, ("none",))])
        self._kept = [dict(table) for table in self._tables]
        for table in self._tables:
            copies = {name: None if buffer is None else buffer.clone() for name, buffer in table.items()}
            table.update(copies)
        self._microbatch = self._samples.exchange(self._microbatch)
        self._inner.__enter__()  # last: it rejects operations that the forward pass did not have

    def __exit__(self, *failure: Any) -> None:
        try:
            self._inner.__exit__(*failure)
        finally:
            self._microbatch = self._samples.exchange(self._microbatch)
            for table, buffers in zip(self._tables, self._kept, strict=True):
                table.update(buffers)


TECHNIQUES = ("FSDP", "Compiled", "Checkpointed")


def versions_of(block: Module) -> dict[str, int]:
    """The versions of the buffers of `block`, by name. A recomputation would read what was written since."""
    return {name: version_of(buffer) for name, buffer in block.named_buffers()}


def written_since(block: Module, versions: Mapping[str, int]) -> str | None:
    """Returns a clause about the first buffer that was written since `versions` was taken, or None.

    The statistics of BatchNorm are left out: a training pass writes them and does not read them.
    """
    for name, version in versions_of(block).items():
        if version != versions.get(name, version) and not name.endswith(STATISTICS):
            return f"the forward pass of {_class_of(block)} writes the buffer {name}"
    return None


def _class_of(block: Module) -> str:
    """The name of the user's class. Techniques derive classes from it, with a prefix in their names."""
    return next(kind.__name__ for kind in type(block).__mro__ if not kind.__name__.startswith(TECHNIQUES))
