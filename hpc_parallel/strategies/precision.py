"""Precision as a technique: which dtype the weights have and which one the matrix products run in."""

from __future__ import annotations

import torch

from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.strategies.replace_forward import replace_forward

WEIGHTS = {"float32": torch.float32, "bfloat16": torch.float32, "float64": torch.float64}


def apply(model: LayeredModel, *, precision: str, device_type: str) -> LayeredModel:
    """Run the forward pass of `model` under autocast where `precision` is bfloat16.

    Weights, gradients and optimizer state stay float32 (Micikevicius et al. 2018). Only the forward
    pass is wrapped, so a pipeline's schedule and its backward passes are outside, as autocast wants.
    """
    if precision == "bfloat16":
        autocast = torch.autocast(device_type, dtype=torch.bfloat16)
        replace_forward(model, autocast(lambda before, *inputs: before(*inputs)), technique="Bfloat16")
    return model
