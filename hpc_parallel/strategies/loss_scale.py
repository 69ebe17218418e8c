"""Loss scaling: gradients of a larger loss, which do not vanish in float16 (Micikevicius et al. 2018)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hpc_parallel import torch_internals
from hpc_parallel.models.layered import Loss

GROWTH, BACKOFF = 2.0, 0.5  # as torch.amp.GradScaler


class LossScale:
    """The factor of the loss: doubled after `grow_every` finite steps, halved after one that is not finite.

    These are the rules of torch.amp.GradScaler, on the device, but the factor stays at least 1. Every rank
    has the same factor, because it depends on the norm of the entire model's gradient.
    """

    def __init__(self, *, start: float, grow_every: int, device: torch.device) -> None:
        full = partial(torch.full, dtype=torch.float32, device=device)  # whatever torch's default is
        self.factor = full((), start)
        self.finite_steps = full((), 0)  # since the factor changed
        self.last_skip = full((2,), 0)  # the factor before and after it
        self._grow_every = grow_every

    def apply(self, loss: Loss) -> Loss:
        """Returns a loss of the same value, whose gradients are `factor` times as large."""

        def scaled(output: Tensor, target: Tensor) -> Tensor:
            return _ScaleGradient.apply(loss(output, target), self.factor)  # type: ignore[no-any-return]

        return scaled

    def unscale(self, gradients: Sequence[Tensor]) -> None:
        """Divide gradients by the factor, in place."""
        torch_internals.scale(gradients, 1 / self.factor)

    @torch.no_grad()
    def update(self, nonfinite: Tensor) -> Tensor:
        """Change the factor after a step. `nonfinite`: whether the step's gradient is not finite.

        Returns whether the gradient is not finite and a smaller factor can make it finite.
        """
        can_shrink = self.factor > 1
        count = torch.where(nonfinite, 0, self.finite_steps + 1)
        grows = count == self._grow_every
        grown = torch.where(grows, self.factor * GROWTH, self.factor)
        shrunk = (self.factor * BACKOFF).clamp(min=1.0)
        skip = torch.stack([self.factor, shrunk])
        self.last_skip.copy_(torch.where(nonfinite, skip, self.last_skip))
        factor = torch.where(nonfinite, shrunk, torch.where(grown.isfinite(), grown, self.factor))
        self.factor.copy_(factor)
        self.finite_steps.copy_(torch.where(grows, 0, count))
        return can_shrink & nonfinite

    def state(self) -> dict[str, Tensor]:
        """The tensors of a checkpoint."""
        return {"factor": self.factor, "finite_steps": self.finite_steps}


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, factor: Tensor) -> Tensor:
        ctx.factor = factor
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None
