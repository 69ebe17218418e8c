"""Forward and backward over microbatches on whole replicas; gradients are averaged once, with the last."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel

from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.strategies.finite_loss import telling


class Accumulate:
    """Sums the gradients of `microbatches` forward and backward passes."""

    copies: Sequence[Parameter] = ()

    def __init__(self, runner: Module, *, model: LayeredModel, microbatches: int) -> None:
        self._runner = runner
        self._model = model
        # DistributedDataParallel would prepare for a backward pass; others evaluate as they train.
        self._forward = model if isinstance(runner, DistributedDataParallel) else runner
        self._microbatches = microbatches
        self._locally: Callable[[], AbstractContextManager[None]] = nullcontext
        if isinstance(runner, DistributedDataParallel):
            self._locally = self._first_step_in_sync if runner.static_graph else runner.no_sync
        elif isinstance(runner, FSDPModule):
            self._locally = self._inside_a_replica
        self._first = True

    def train(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of this replica's batch `[batch, ...]`; its gradients are added to the weights'."""
        terms = self._model.loss_terms(targets)
        pieces = list(zip(inputs.chunk(self._microbatches), targets.chunk(self._microbatches), strict=True))
        losses = []
        for index, (microbatch, expected) in enumerate(pieces):
            last = index == len(pieces) - 1
            with nullcontext() if last else self._locally():
                loss = telling(self._model.loss(self._runner(microbatch), expected) / terms)
                loss.backward()
            losses.append(loss.detach())
        self._first = False
        return torch.stack(losses).sum()

    def _first_step_in_sync(self) -> AbstractContextManager[None]:
        """A static graph is learnt in the first step, in which torch can't leave out an all-reduce.

        Averaging the sum so far with every microbatch is needless, and right: what has been averaged
        already is the same on all ranks.
        """
        return nullcontext() if self._first else self._runner.no_sync()  # type: ignore[operator]

    @contextmanager
    def _inside_a_replica(self) -> Iterator[None]:
        """Slices are summed with every microbatch, or they would not be slices; over replicas once."""
        self._runner.set_requires_all_reduce(False)  # type: ignore[operator]
        yield
        self._runner.set_requires_all_reduce(True)  # type: ignore[operator]

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of this replica's batch, forward only."""
        terms = self._model.loss_terms(targets)
        pieces = zip(inputs.chunk(self._microbatches), targets.chunk(self._microbatches), strict=True)
        losses = [self._model.loss(self._forward(microbatch), expected) for microbatch, expected in pieces]
        return torch.stack(losses).sum() / terms
