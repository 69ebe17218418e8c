"""A loss term that a block adds to the model's loss, in any stage of a pipeline."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class AuxiliaryLoss(nn.Module):
    """Passes activations on and adds the gradient of `term`, as if `LayeredModel.loss` had added the term.

    The reported loss does not include the term, because the stage that computes the loss may not have the
    term (as in Megatron-Core's MoEAuxLossAutoScaler).
    """

    def __init__(self) -> None:
        super().__init__()
        self.loss_terms: float | Tensor = 1
        """The terms of the batch that is being trained on (`LossTerms`); the loss is divided by it."""
        self.copies = 1
        """The number of devices that each compute the whole term, whose gradients are added up."""
        self.loss_scale: Tensor | None = None
        """The factor of all gradients, if the loss has one."""

    def forward(self, x: Tensor, term: Tensor) -> Tensor:
        """Returns `x`. `term` is a scalar, in the unit of the SUM that `LayeredModel.loss` returns."""
        terms = self.loss_terms * self.copies
        return _AddGradient.apply(x, term, terms, self.loss_scale)  # type: ignore[no-any-return]


class SequenceSum(nn.Module):
    """Sums over the positions of a sequence, for a term of whole sequences: returns its input.

    The context axis replaces it by a sum over the `parts` of a sequence (`split_sequence.py`).
    """

    parts = 1

    def forward(self, sums: Tensor) -> Tensor:
        """`sums` of this device's positions, of any shape."""
        return sums


def auxiliary_losses(models: Iterable[nn.Module]) -> list[AuxiliaryLoss]:
    return [module for model in models for module in model.modules() if isinstance(module, AuxiliaryLoss)]


class _AddGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, term: Tensor, loss_terms: float | Tensor, loss_scale: Tensor | None
    ) -> Tensor:
        ctx.gradient = torch.ones_like(term) / loss_terms
        if loss_scale is not None:
            ctx.gradient *= loss_scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return gradients[0], ctx.gradient, None, None
