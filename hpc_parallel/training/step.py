"""One optimizer step, from a batch to device tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from traceback import walk_tb
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.strategies.assemble import Assembled
from hpc_parallel.strategies.forward_backward import ForwardBackward
from hpc_parallel.strategies.mesh import local_gradients, weight_axes
from hpc_parallel.strategies.parameter_server import ParameterServer
from hpc_parallel.strategies.ranges import marked
from hpc_parallel.supervise.error_place import located, mark
from hpc_parallel.training.checkpoint import statistics
from hpc_parallel.training.gradient_norm import GradientNorm, clip
from hpc_parallel.training.nonfinite import Guard
from hpc_parallel.training.nonfinite_trace import Finding, trace
from hpc_parallel.training.optimizer import ModelOptimizer
from hpc_parallel.training.state_bytes import local_bytes

BatchOf = Callable[[int], tuple[Tensor, Tensor]]
"""A 1-based step -> inputs and targets of this replica, on the device."""


@dataclass(frozen=True)
class StepResult:
    """Scalars on the device. Read them late, because reading waits for the device."""

    loss: Tensor  # mean loss of this replica's batch; zero if another rank of the replica has it
    gradient_norm: Tensor  # of the entire model, before clipping; always valid on rank 0
    skipped: Tensor | None = None  # steps skipped so far, valid on rank 0; None if none may be


class Step(Protocol):
    """One optimizer step of a strategy."""

    held_bytes: Mapping[str, int]  # `parameters` and `gradients` of this rank; empty before the first step

    def run(self, inputs: Tensor, targets: Tensor) -> StepResult:
        """Train on this replica's batch `[batch, ...]` and update the weights."""

    def raise_if_nonfinite(self, step: int, *, batch_of: BatchOf) -> None:
        """Check on the host for losses or gradients that were not finite up to the 1-based `step`.

        `batch_of`: the batch of a step, to run the first such step again.

        All ranks must call it together. Raises what `training.nonfinite.Guard.raise_if_nonfinite` raises.
        """

    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean loss of this replica's batch; zero if another rank of the replica has it."""


class GradientStep:
    """Runs the strategy's forward and backward passes, clips, and updates this rank's weights."""

    def __init__(
        self,
        assembled: Assembled,
        *,
        optimizer: ModelOptimizer,
        clip_norm: float | None,
        on_nonfinite: str,
        on_gradients: Callable[[], None] | None = None,
    ) -> None:
        """`on_nonfinite`: stop, skip or rollback; what to do if a step's gradient is not finite.

        `on_gradients` is called in each step when `.grad` is complete, before it is clipped.
        """
        self._forward_backward: ForwardBackward = assembled.forward_backward
        self._parts = assembled.parts
        self._compiled = assembled.compiled
        self._parameters: list[Parameter] = [p for part in assembled.parts for p in part.parameters()]
        self._optimizer = optimizer
        self._clip_norm = clip_norm
        self.held_bytes: Mapping[str, int] = {}
        self._on_gradients = on_gradients
        copies = {id(copy) for copy in self._forward_backward.copies}
        self._norm = GradientNorm(
            [parameter for parameter in self._parameters if id(parameter) not in copies],
            axes=weight_axes(assembled.mesh),
        )
        names = {id(parameter): name for name, parameter in assembled.named_parameters().items()}
        counted = {names[id(parameter)]: parameter for parameter in self._norm.counted}
        buffers = list(statistics(assembled).values())
        self._loss_scale = assembled.loss_scale
        self._guard = Guard(
            counted, optimizer=optimizer, policy=on_nonfinite, buffers=buffers, loss_scale=self._loss_scale
        )

    def run(self, inputs: Tensor, targets: Tensor) -> StepResult:
        loss = self._train(inputs, targets)
        return StepResult(loss=loss, gradient_norm=self._update(loss), skipped=self._guard.skipped)

    def raise_if_nonfinite(self, step: int, *, batch_of: BatchOf) -> None:
        def trace_step(bad_step: int) -> Finding:
            replay = partial(self._forward_backward.train, *batch_of(bad_step))
            return trace(self._parts, compiled=self._compiled, replay=replay)

        self._guard.raise_if_nonfinite(step, trace=trace_step)

    def _train(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self._guard.remember_buffers()
        try:
            return self._forward_backward.train(inputs, targets)
        except Exception as error:
            mark(error, place_in_backward(error, parts=self._parts) or "the loss")
            raise

    def _count_bytes(self) -> None:
        """Count what this rank holds, in the first step, when its gradients are complete."""
        if not self.held_bytes:
            gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
            self.held_bytes = {
                "parameters": local_bytes(self._parameters), "gradients": local_bytes(gradients)
            }  # fmt: skip

    @located("the optimizer")
    def _update(self, loss: Tensor) -> Tensor:
        """Clip and step; returns the gradient's norm before clipping."""
        self._count_bytes()
        if self._loss_scale is not None:
            self._loss_scale.unscale(local_gradients(self._parameters))
        norm, norms = self._norm()
        self._guard.note(norm=norm, norms=norms, loss=loss)
        if self._on_gradients is not None:
            self._on_gradients()
        if self._clip_norm is not None:
            clip(self._parameters, norm=norm, max_norm=self._clip_norm)
        with marked("optimizer"):
            self._optimizer.step()
        self._optimizer.zero_grad()
        return norm

    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        for part in self._parts:
            part.eval()
        loss = self._forward_backward.evaluate(inputs, targets)
        for part in self._parts:
            part.train()
        return loss


class ServedStep(GradientStep):
    """Sends gradients to the parameter server, which updates the weights and sends them back.

    `on_gradients` is called on the server only, because no other rank has the complete gradient.
    """

    def __init__(self, server: ParameterServer, assembled: Assembled, **options: Any) -> None:
        super().__init__(assembled, **options)
        self._server = server

    def run(self, inputs: Tensor, targets: Tensor) -> StepResult:
        loss = self._train(inputs, targets)
        if not self._server.serves:
            self._count_bytes()  # a worker's go to the server, a server's come from there
        self._server.collect()
        norm = self._update(loss) if self._server.serves else torch.zeros_like(loss)
        self._server.hand_out()
        if self._loss_scale is not None:
            self._server.share(self._loss_scale.state().values())
        return StepResult(loss=loss, gradient_norm=norm, skipped=self._guard.skipped)


def build_step(
    assembled: Assembled,
    *,
    optimizer: ModelOptimizer,
    clip_norm: float | None,
    on_nonfinite: str = "stop",
    on_gradients: Callable[[], None] | None = None,
) -> Step:
    """Build the step for the strategy of `assembled`; the arguments are those of `GradientStep`."""
    kind = GradientStep if assembled.server is None else partial(ServedStep, assembled.server)
    return kind(
        assembled,
        optimizer=optimizer,
        clip_norm=clip_norm,
        on_nonfinite=on_nonfinite,
        on_gradients=on_gradients,
    )


def place_in_backward(error: BaseException, *, parts: Sequence[LayeredModel]) -> str | None:
    """Find where the backward pass failed, by the gradients that are missing; None if it had not begun.

    Autograd passes the blocks from the last to the first and does not report where it is. After the
    first of several microbatches all weights have gradients, and only "the backward pass" is known.
    """
    functions = set()
    cause: BaseException | None = error
    while cause is not None:
        functions |= {frame.f_code.co_name for frame, _ in walk_tb(cause.__traceback__)}
        cause = cause.__cause__
    if "_engine_run_backward" not in functions:
        return None
    for part in reversed(parts):
        modules = {"stem": part.stem, **{f"block {name}": block for name, block in part.blocks.items()}}
        for part_name, module in reversed([*modules.items(), ("head", part.head)]):
            weights = [] if module is None else module.parameters()
            if any(weight.grad is None and weight.requires_grad for weight in weights):
                return f"{part_name}'s backward pass"
    return "the backward pass"
