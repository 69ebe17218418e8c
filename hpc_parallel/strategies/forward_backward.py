"""Computes the gradients of a batch on this rank.

`Accumulate` runs whole replicas. A pipeline has its own schedule (pipeline.py). `SequenceParts` and
`TensorGroup` wrap either of them if several ranks train on the same samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from traceback import walk_tb
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel

from hpc_parallel.config.schema import StrategyConfig
from hpc_parallel.models.auxiliary_loss import auxiliary_losses
from hpc_parallel.models.layered import LayeredModel, Loss
from hpc_parallel.strategies.context.ring import slices_of
from hpc_parallel.strategies.loss import LossTerms, propagate_nonfinite
from hpc_parallel.strategies.ranges import marked


class ForwardBackward(Protocol):
    """A strategy's schedule of forward and backward passes."""

    copies: Sequence[Parameter]
    """Weights of this rank that another rank also holds and counts in the gradient's norm."""

    def train(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Add the gradients of the replica's mean loss to `.grad`.

        Returns the loss, or zero if a peer has it.
        """

    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Returns this rank's share of the replica's sums [loss, terms, *metrics] without gradients.

        The shares of all ranks add up to the sums. If a peer has them, returns zeros, or one zero without a
        dim.
        """


class Accumulate:
    """Sums the gradients of `microbatches` forward and backward passes; the last one averages them once."""

    copies: Sequence[Parameter] = ()

    def __init__(
        self, runner: Module, *, model: LayeredModel, loss: Loss, terms: LossTerms, microbatches: int
    ) -> None:
        """`runner`: the `model`, possibly in a wrapper such as DistributedDataParallel."""
        self._runner = runner
        self._model = model
        self._loss = loss
        self._auxiliary_losses = auxiliary_losses([model])
        # Evaluate without DistributedDataParallel, which would prepare for a backward pass.
        self._forward = model if isinstance(runner, DistributedDataParallel) else runner
        self._microbatches = microbatches
        self._terms = terms
        self._without_averaging: Callable[[], AbstractContextManager[None]] = nullcontext
        if isinstance(runner, DistributedDataParallel):
            self._without_averaging = self._first_step_in_sync if runner.static_graph else runner.no_sync
        elif isinstance(runner, FSDPModule):
            self._without_averaging = self._inside_a_replica
        self._first = True

    def train(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean loss of this replica's batch `[batch, ...]`; adds its gradients to `.grad`."""
        terms = self._terms(targets)
        for auxiliary in self._auxiliary_losses:
            auxiliary.loss_terms = terms
        pieces = self._split(inputs, targets)
        losses = []
        for index, (samples, expected) in enumerate(pieces):
            if self._model.sample_indices.used:  # by dropout
                self._model.sample_indices.begin_microbatch(index, count=len(pieces))
            last = index == len(pieces) - 1
            with nullcontext() if last else self._without_averaging():
                with marked("forward"):
                    loss = propagate_nonfinite(self._loss(self._runner(samples), expected) / terms)
                with marked("backward"):
                    loss.backward()
            losses.append(loss.detach())
        self._first = False
        return torch.stack(losses).sum()

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The sums of this replica's batch, forward only."""
        sums = [
            self._loss(self._forward(samples), expected) for samples, expected in self._split(inputs, targets)
        ]
        return torch.stack(sums).sum(0)

    def _split(self, inputs: Tensor, targets: Tensor) -> list[tuple[Tensor, Tensor]]:
        return list(zip(inputs.chunk(self._microbatches), targets.chunk(self._microbatches), strict=True))

    def _first_step_in_sync(self) -> AbstractContextManager[None]:
        """DistributedDataParallel learns a static graph in the first step and can't omit an all-reduce there.

        Averaging the sum after every microbatch is superfluous but correct: the part that has been averaged
        already is the same on all ranks.
        """
        return nullcontext() if self._first else self._runner.no_sync()  # type: ignore[operator]

    @contextmanager
    def _inside_a_replica(self) -> Iterator[None]:
        """Sum over a replica's ranks in every microbatch, to keep slices; average over replicas only once."""
        self._runner.set_requires_all_reduce(False)  # type: ignore[operator]
        yield
        self._runner.set_requires_all_reduce(True)  # type: ignore[operator]


class InContext:
    """The `inner` schedule, whose passes run inside a context."""

    def __init__(self, inner: ForwardBackward, context: Callable[[], AbstractContextManager[None]]) -> None:
        self._inner, self._context = inner, context
        self.copies = inner.copies

    def train(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with self._context():
            return self._inner.train(inputs, targets)

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with self._context():
            return self._inner.evaluate(inputs, targets)


class SequenceParts:
    """The ranks of a context axis train on the same samples `[batch, seq, ...]`, each on its slices."""

    def __init__(self, inner: ForwardBackward, *, axis: DeviceMesh) -> None:
        self._inner = inner
        self._rank = axis.get_local_rank()
        self._degree = axis.size()
        self.copies = inner.copies

    def train(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self._inner.train(self._slices(inputs), self._slices(targets)) / self._degree

    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self._inner.evaluate(self._slices(inputs), self._slices(targets))

    def _slices(self, sequence: Tensor) -> Tensor:
        slices = slices_of(self._rank, degree=self._degree, length=sequence.shape[1])
        return torch.cat([sequence[:, part] for part in slices], dim=1)


class TensorGroup:
    """The ranks of a tensor axis train on the same samples and compute one loss; the first one returns it."""

    def __init__(self, inner: ForwardBackward, *, axis: DeviceMesh, options: StrategyConfig) -> None:
        self._inner = inner
        self._returns_loss = axis.get_local_rank() == 0
        self._loss_context = loss_parallel if options.loss_parallel else nullcontext
        self.copies = inner.copies

    def train(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with self._loss_context():  # around the backward pass too, as torch requires
            return self._loss_or_zero(self._inner.train(inputs, targets))

    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with self._loss_context():
            return self._loss_or_zero(self._inner.evaluate(inputs, targets))

    def _loss_or_zero(self, loss: Tensor) -> Tensor:
        return loss if self._returns_loss else torch.zeros_like(loss)


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
