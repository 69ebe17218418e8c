"""Finds the layer whose output, or whose output's gradient, was the first that is not finite.

A step whose gradient is not finite does not change the weights, and the samples of a step are known. So the
step can run again with hooks on every layer. Such hooks would be too slow for all steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module

from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.torch_internals import tree_leaves

OUTPUT, GRADIENT = "output", "gradient"
FirstLayers = Mapping[str, tuple[str, str]]
"""OUTPUT or GRADIENT -> (name of the layer, its first value that is not finite), of one rank."""


def trace(
    parts: Sequence[LayeredModel],
    *,
    compiled: bool,
    whole: bool = False,
    replay: Callable[[], object],
) -> FirstLayers:
    """Returns this rank's first layer with an output that is not finite, and the first with such a gradient.

    `replay`: runs the forward and backward passes of the step again; collective over all ranks. If blocks are
    compiled, only the outputs of whole blocks are seen. A model compiled as a `whole` runs uncompiled here.
    """
    finding: dict[str, tuple[str, str]] = {}
    handles = []
    for part in parts:
        for name, module in _layers(part, compiled=compiled and not whole):
            handles.append(module.register_forward_hook(partial(_after_forward, finding, name)))
    try:
        with torch.compiler.set_stance("force_eager") if whole else nullcontext():
            replay()
    finally:
        for handle in handles:
            handle.remove()
    return finding


def _layers(part: LayeredModel, *, compiled: bool) -> Iterable[tuple[str, Module]]:
    if not compiled:
        return [(name, module) for name, module in part.named_modules() if name]
    blocks = [(f"blocks.{name}", block) for name, block in part.blocks.items()]
    ends = [(name, end) for name, end in (("stem", part.stem), ("head", part.head)) if end is not None]
    return [*blocks, *ends]


def _after_forward(
    finding: dict[str, tuple[str, str]], name: str, module: Module, inputs: Any, output: Any
) -> None:
    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            _note(finding, OUTPUT, name, tensor)
            if tensor.requires_grad:
                tensor.register_hook(partial(_note, finding, GRADIENT, name))


@torch.no_grad()
def _note(finding: dict[str, tuple[str, str]], kind: str, name: str, tensor: Tensor) -> None:
    """Keep the first finding of its kind. The host reads the tensor."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if kind not in finding and not bool(local.isfinite().all()):
        finding[kind] = name, str(float(local[~local.isfinite()][0]))


def first_clause(
    by_rank: Sequence[FirstLayers], *, order: Callable[[str], tuple[int, int, str]]
) -> tuple[int, str, str] | None:
    """Returns the rank, a clause and the layer's name of the first finding of all ranks; None without any.

    A forward pass runs in the `order` of the model, and a backward pass in the reverse order.
    """
    for kind, sign in ((OUTPUT, 1), (GRADIENT, -1)):
        candidates = [
            (tuple(sign * number for number in order(finding[kind][0])[:2]), rank)
            for rank, finding in enumerate(by_rank)
            if kind in finding
        ]
        if candidates:
            _, rank = min(candidates)
            name, value = by_rank[rank][kind]
            subject = "the output" if kind == OUTPUT else "the gradient of the output"
            number = "nan" if math.isnan(float(value)) else value
            return rank, f"{subject} of {name} was the first that is not finite ({number})", name
    return None
