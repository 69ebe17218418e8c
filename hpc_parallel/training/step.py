"""One optimizer step, as the trainer sees it: a batch in, device tensors out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from hpc_parallel.strategies.assemble import Assembled, ForwardBackward
from hpc_parallel.strategies.mesh import weight_axes
from hpc_parallel.strategies.parameter_server import ParameterServer
from hpc_parallel.training.optimizer import GradientNorm, clip


@dataclass(frozen=True)
class StepResult:
    """Scalars on the device, read by whoever needs them, late."""

    loss: Tensor  # mean loss of this replica's batch; zero where a peer has it
    gradient_norm: Tensor  # of the whole model, before clipping; rank 0 has it always


class Step(Protocol):
    def run(self, inputs: Tensor, targets: Tensor) -> StepResult:
        """Take this replica's batch `[batch, ...]` and update the weights."""

    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of this replica's batch; zero where a peer has it."""


class GradientStep:
    """Forward and backward by the strategy, then clipping and the optimizer on this rank's weights."""

    def __init__(
        self,
        assembled: Assembled,
        *,
        optimizer: Optimizer,
        clip_norm: float | None,
        on_gradients: Callable[[], None] | None = None,
    ) -> None:
        """`on_gradients` is called in each step when `.grad` is complete, before it is clipped."""
        self._forward_backward: ForwardBackward = assembled.forward_backward
        self._parts = assembled.parts
        self._parameters: list[Parameter] = [p for part in assembled.parts for p in part.parameters()]
        self._optimizer = optimizer
        self._clip_norm = clip_norm
        self._on_gradients = on_gradients
        copies = {id(copy) for copy in self._forward_backward.copies}
        self._norm = GradientNorm(
            [parameter for parameter in self._parameters if id(parameter) not in copies],
            axes=weight_axes(assembled.mesh),
        )

    def run(self, inputs: Tensor, targets: Tensor) -> StepResult:
        loss = self._forward_backward.train(inputs, targets)
        return StepResult(loss=loss, gradient_norm=self._update())

    def _update(self) -> Tensor:
        """Clip and step; the gradient's norm as it was before."""
        norm = self._norm()
        if self._on_gradients is not None:
            self._on_gradients()
        if self._clip_norm is not None:
            clip(self._parameters, norm=norm, most=self._clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        for part in self._parts:
            part.eval()
        loss = self._forward_backward.evaluate(inputs, targets)
        for part in self._parts:
            part.train()
        return loss


class ServedStep(GradientStep):
    """A round of a parameter server, who alone updates: gradients to it, weights back from it.

    `on_gradients` is called on the server only, which alone has the whole gradient.
    """

    def __init__(self, server: ParameterServer, assembled: Assembled, **options: Any) -> None:
        super().__init__(assembled, **options)
        self._server = server

    def run(self, inputs: Tensor, targets: Tensor) -> StepResult:
        loss = self._forward_backward.train(inputs, targets)
        self._server.collect()
        norm = self._update() if self._server.serves else torch.zeros_like(loss)
        self._server.hand_out()
        return StepResult(loss=loss, gradient_norm=norm)


def build_step(
    assembled: Assembled,
    *,
    optimizer: Optimizer,
    clip_norm: float | None,
    on_gradients: Callable[[], None] | None = None,
) -> Step:
    """The step of the strategy that `assembled` was made by; arguments as of `GradientStep`."""
    kind = GradientStep if assembled.server is None else partial(ServedStep, assembled.server)
    return kind(assembled, optimizer=optimizer, clip_norm=clip_norm, on_gradients=on_gradients)
