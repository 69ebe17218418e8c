"""Finds modules that count positions themselves or mix positions outside `CausalAttention`.

Such a module gives wrong results if a device has only a part of a sequence: under `context`, or if the model
continues a text with cached keys and values. Not every such module is recognised; `proof/verify.py` compares
results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.strategies.dry_forward import LENGTH, first_clause
from hpc_parallel.torch_internals import tree_leaves

FACTORIES = ("aten::arange", "aten::linspace", "aten::range")
CUTS = ("aten::slice", "aten::narrow", "aten::select")
ATTENTION = "scaled_dot_product"


def find_local_positions(model: LayeredModel) -> str | None:
    """Returns a clause about the first module of `model` (on meta) that counts or mixes positions, or None.

    Returns None as well if the model can't run on meta tensors.
    """
    return first_clause(model, _judge)


def _judge(place: str, operator: str, args: Sequence[Any], output: Any) -> str | None:
    shapes = [leaf.shape for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    if operator.startswith(FACTORIES) and any(shape == (LENGTH,) for shape in shapes):
        return "counts positions from the length of its input"
    if operator.startswith(CUTS) and isinstance(args[0], Parameter) and any(LENGTH in s for s in shapes):
        return "cuts a table of positions by the length of its input"
    if ATTENTION in operator or any(shape[-2:] == (LENGTH, LENGTH) for shape in shapes):
        return "mixes positions outside CausalAttention (models/attention.py)"
    return None
