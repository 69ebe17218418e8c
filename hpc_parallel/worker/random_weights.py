"""Random numbers of order 1 in every weight of a small model, so that a comparison sees every part of it.

Many models start with gates or heads at zero, behind which a wrong layout computes the right thing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpc_parallel.models.drawn_weights import tensor_seed
from hpc_parallel.models.layered import LayeredModel


def randomise(model: LayeredModel, *, seed: int) -> LayeredModel:
    """Let the whole `model`, on meta, start with random numbers; returns it.

    A matrix keeps the size of what it is multiplied with. A vector or scalar is between 0.5 and 1.5. A buffer
    has its own values times such a number, or such a number instead of zero: an infinity in a mask stays.
    """
    initialise_model, buffers = model.initialise, {name for name, _ in model.named_buffers()}

    def initialise(name: str, tensor: Tensor, generator: torch.Generator) -> None:
        if name in buffers or not tensor.is_floating_point():
            initialise_model(name, tensor, generator)
            if tensor.is_floating_point():
                _vary(tensor, generator)
        elif tensor.dim() < 2:
            tensor.uniform_(0.5, 1.5, generator=generator)
        else:
            tensor.normal_(std=max(1, tensor.shape[1:].numel()) ** -0.5, generator=generator)

    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and not buffer.is_meta:  # a constructor has filled it
            _vary(buffer, torch.Generator().manual_seed(tensor_seed(seed, name) >> 1))
    model.initialise = initialise  # type: ignore[method-assign]
    return model


def _vary(buffer: Tensor, generator: torch.Generator) -> None:
    factor = torch.empty_like(buffer).uniform_(0.5, 1.5, generator=generator)
    buffer.copy_(torch.where(buffer == 0, factor, buffer * factor))
