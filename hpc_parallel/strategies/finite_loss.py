"""A loss that is not finite must show in its gradients, by which alone all ranks hear of it."""

from __future__ import annotations

from torch import Tensor


def telling(loss: Tensor) -> Tensor:
    """`loss` to the bit with its own gradients, or where it is not finite NaN with gradients of NaN.

    The derivative of an infinite cross-entropy is finite: only the rank that has the loss would know.
    """
    return loss * (1 + 0 * loss.detach())
