"""Precision: the dtype of the weights and the dtype of the matrix products."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from hpc_parallel.config.schema import TrainingConfig
from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.strategies.replace_forward import replace_forward

WEIGHTS = {
    "float32": torch.float32, "bfloat16": torch.float32, "float16": torch.float32, "float64": torch.float64,
}  # fmt: skip
HALF: Mapping[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16}
Sums = TypeVar("Sums")


def weights_dtype(training: TrainingConfig) -> torch.dtype:
    """The type of the weights. float64 runs hold weights in float64 even if they are rounded to bfloat16."""
    rounded = training.weights == "bfloat16" and training.precision != "float64"
    return torch.bfloat16 if rounded else WEIGHTS[training.precision]


def apply(model: LayeredModel, *, precision: str, device_type: str) -> LayeredModel:
    """Run the forward pass of `model` under autocast if `precision` is bfloat16 or float16.

    Weights and gradients stay as they are, float32 by default (Micikevicius et al. 2018). Only the forward
    pass is wrapped, because autocast must not cover the backward passes of a pipeline's schedule.
    """
    if precision in HALF:
        autocast = torch.autocast(device_type, dtype=HALF[precision])
        technique = precision.capitalize()
        replace_forward(model, autocast(_original), technique=technique)
    return model


def _original(forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    """The forward pass itself; a later stage of packed documents gets `document_starts` by name."""
    return forward(*inputs, **named)


def of_floats(function: Callable[[Any, Tensor], Sums], *, precision: str) -> Callable[[Any, Tensor], Sums]:
    """Returns `function(output, target)`, a loss or metrics, for outputs in half precision.

    It gets them in float32: a sum over a batch overflows float16 at 65,504, and has 3 digits in bfloat16.
    """
    return function if precision not in HALF else lambda output, target: function(_float(output), target)


def _float(output: Any) -> Any:
    """A tensor in half precision, or those in a tuple; all else stays as it is."""
    if isinstance(output, tuple):
        items = map(_float, output)
        return type(output)(*items) if hasattr(output, "_fields") else tuple(items)
    is_half = isinstance(output, Tensor) and output.dtype in HALF.values()
    return output.float() if is_half else output
