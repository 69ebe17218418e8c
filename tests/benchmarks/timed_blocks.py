"""A model whose blocks all take the same time by the clock, whatever else slows the machine's cores."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from hpc_parallel.models.layered import LayeredModel


class TimedModel(LayeredModel):
    """`depth` blocks of `seconds` forward each, twice that backward; stem and head cost next to nothing."""

    def __init__(self, *, depth: int, seconds: float, width: int = 16) -> None:
        blocks = [TimedBlock(width, seconds) for _ in range(depth)]
        super().__init__(stem=nn.Embedding(256, width), blocks=blocks, head=nn.Linear(width, 256))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.float().flatten(0, 1), target.flatten(), reduction="sum")


class TimedBlock(nn.Module):
    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        computed: Tensor = Compute.apply(x + self.linear(x), self.seconds)
        return computed


class Compute(torch.autograd.Function):
    """Nothing but matrix products until the time is over."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        compute_for(seconds)
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        compute_for(2 * ctx.seconds)
        return gradient, None


def compute_for(seconds: float) -> None:
    until = perf_counter() + seconds
    factor = torch.ones(64, 64)
    while perf_counter() < until:
        factor @ factor
