"""Compilation by torch.compile (Ansel et al. 2024): of the whole model, or of each block.

Blocks of equal shapes share their code.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from hpc_parallel.models.layered import LayeredModel, Loss, stem_outputs, unpacked
from hpc_parallel.problems import ConfigError, Problem
from hpc_parallel.strategies.checkpointing import versions_of, written_since
from hpc_parallel.strategies.replace_forward import Forward, replace_forward
from hpc_parallel.torch_internals import (
    allow_recompiles,
    allow_unknown_sizes,
    graph_break,
    save_meshes_behind_random_states,
    set_memory_budget,
    wrap_integers,
)

SHAPES = 64  # at most this many input shapes: microbatches in training, batch sizes in inference


def apply(model: LayeredModel, *, memory_budget: float | None = None, whole: bool = False) -> LayeredModel:
    """Compile the full forward pass of every block of `model`, but not the wrappers of a block.

    Therefore hooks on the block itself (fully_shard's) are never compiled, and parameters keep their names.
    memory_budget: `training.memory_budget`. whole: compile the stem, the blocks and the head as one graph; a
    block must not have a wrapper then.
    """
    set_memory_budget(1.0 if memory_budget is None else memory_budget)
    allow_recompiles(SHAPES * len(model.blocks))
    allow_unknown_sizes()
    save_meshes_behind_random_states()
    wrap_integers()
    run = partial(run_compiled, cache(partial(torch.compile, fullgraph=True, dynamic=False)), set())
    if whole:
        replace_forward(model, partial(run_whole, run, []), technique="Compiled")
        return model
    for block in model.distinct_blocks:
        replace_forward(block, run, technique="Compiled")
    return model


def compile_loss(loss: Loss) -> Loss:
    """The loss in one piece, without a copy of the logits for each of its operations."""
    compiled: Loss = torch.compile(loss, dynamic=False)
    return compiled


def run_compiled(
    compiled: Any, looked_at: set[int], forward: Forward, block: Module, *inputs: Tensor
) -> Tensor:
    """Run the compiled block. An AsyncCollectiveTensor is copied first, which waits for its collective.

    Without the copy, the gradient in torch 2.13 skips the operation that made the input a plain tensor.

    If the block has a method `prepare_compiled`, it is called with the inputs first (`LayeredModel`).
    `looked_at`: the ids of the blocks that write no buffer.
    """
    plain = [x if type(x) is Tensor else x.clone() for x in inputs]
    prepare = getattr(block, "prepare_compiled", None)
    if prepare is not None:
        prepare(*plain)
    if id(block) in looked_at or not (block.training and torch.is_grad_enabled()):
        return _run(compiled, forward, block, plain)
    versions = versions_of(block)
    output = _run(compiled, forward, block, plain)
    if clause := written_since(block, versions):  # torch 2.13 recomputes values that depend on the buffer
        raise _refused(block, f"can't be used: {clause}, and compiled gradients would use its later value")
    looked_at.add(id(block))
    return output


def run_whole(
    run: Forward, last: list[Any], forward: Forward, model: LayeredModel, *inputs: Tensor
) -> Tensor:
    """Run the compiled model. `last`: the shape of the inputs of the last call.

    If the shape differs from the last one, each block's `prepare_compiled` gets the stem's outputs. (In our
    models, all blocks with this method have inputs of the same shape.)
    """
    shape = [x.shape for x in inputs]
    methods = [getattr(block, "prepare_compiled", None) for block in model.distinct_blocks]
    if last != shape and any(methods):
        with torch.no_grad():
            state = inputs if model.stem is None else stem_outputs(model, *unpacked(model, *inputs))
        for prepare in filter(None, methods):
            prepare(*state)
    last[:] = shape
    return run(forward, model, *inputs)


def _run(compiled: Any, forward: Forward, block: Module, inputs: Sequence[Tensor]) -> Tensor:
    """Raises ConfigError if torch can't compile the block in one piece."""
    try:
        return compiled(forward)(block, *inputs)  # type: ignore[no-any-return]
    except RuntimeError as error:
        if (clause := graph_break(error)) is None:
            raise
        raise _refused(block, f"can't be used: torch can't compile a block in one piece: {clause}") from error


def _refused(part: Module, rule: str) -> ConfigError:
    if not isinstance(part, LayeredModel):
        return ConfigError([Problem("training.compile", True, rule, (False,))])
    return ConfigError(
        [Problem("training.compile_whole", True, rule.replace(" a block ", " the model "), (False,))]
    )
