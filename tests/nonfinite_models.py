"""A model with a layer that gives values that are not finite, in the forward or in the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.dropout_models import Tokens


class NanGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.nan


class Harm(nn.Module):
    """The same values, but the first one of each sample divided by zero, or gradients of NaN."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "gradient":
            return NanGradient.apply(x)
        divisor = torch.ones_like(x)
        divisor[:, 0] = 0
        return x / divisor


class Harmed(Tokens):
    """Four blocks; the third is harmed behind its norm."""

    def __init__(self, *, kind: str) -> None:
        super().__init__(layers=4, width=16, rate=0.0)
        block = self.blocks["2"]
        block.norm = nn.Sequential(block.norm, Harm(kind))
