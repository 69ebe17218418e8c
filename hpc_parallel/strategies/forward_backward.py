"""How a batch goes through the model on this rank: what every strategy offers to the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor
from torch.nn import Parameter


class ForwardBackward(Protocol):
    """A strategy's way through the layers."""

    copies: Sequence[Parameter]
    """Weights of this rank that are a peer's too, who counts them in the gradient's norm."""

    def train(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Gradients of the replica's mean loss into `.grad`; that loss, or zero where a peer has it."""

    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The replica's mean loss without gradients; zero where a peer has it."""
