"""The loss of packed samples from their documents one by one, unpadded."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from hpc_parallel.models.layered import LayeredModel


def loss_of_documents(model: LayeredModel, inputs: Tensor, targets: Tensor) -> Tensor:
    """The summed cross-entropy. `inputs` [batch, seq, 2], `targets` [batch, seq], as `Packed.batch`."""
    losses = []
    for row, expected in zip(inputs, targets, strict=True):
        for start in row[:, 1].unique().tolist():
            inside = (row[:, 1] == start) & (expected != -100)
            if inside.any():
                logits = model(row[None, inside, 0])[0]
                losses.append(F.cross_entropy(logits, expected[inside], reduction="sum"))
    return torch.stack(losses).sum()
