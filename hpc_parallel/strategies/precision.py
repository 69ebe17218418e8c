"""Precision: the dtype of the weights and the dtype of the matrix products."""

from __future__ import annotations

import torch

from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.strategies.replace_forward import replace_forward

WEIGHTS = {
    "float32": torch.float32, "bfloat16": torch.float32, "float16": torch.float32, "float64": torch.float64,
}  # fmt: skip
HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def apply(model: LayeredModel, *, precision: str, device_type: str) -> LayeredModel:
    """Run the forward pass of `model` under autocast if `precision` is bfloat16 or float16.

    Weights, gradients and optimizer state stay float32 (Micikevicius et al. 2018). Only the forward pass is
    wrapped, because autocast must not cover the backward passes of a pipeline's schedule.
    """
    if precision in HALF:
        autocast = torch.autocast(device_type, dtype=HALF[precision])
        technique = precision.capitalize()
        replace_forward(model, autocast(lambda original, *inputs: original(*inputs)), technique=technique)
    return model
