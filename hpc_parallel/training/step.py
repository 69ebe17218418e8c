"""One optimizer step on one page, for every strategy: from the batch to the updated weights.

`Step.train` fetches the batch and calls `run`: forward and backward passes, the gradient's norm, the update.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hpc_parallel.data.sampler import Batch
from hpc_parallel.failure.error_place import mark
from hpc_parallel.models.drawn_weights import local_of
from hpc_parallel.models.layered import STATISTICS
from hpc_parallel.problems import print_warning
from hpc_parallel.strategies.assemble import Assembled
from hpc_parallel.strategies.exchange import all_gather
from hpc_parallel.strategies.forward_backward import place_in_backward
from hpc_parallel.strategies.gradients import GradientNorm, clip, local_gradients
from hpc_parallel.strategies.mesh import weight_axes
from hpc_parallel.strategies.ranges import marked
from hpc_parallel.torch_internals import version_of
from hpc_parallel.training.checkpoint import statistics
from hpc_parallel.training.metrics import StepResult
from hpc_parallel.training.nonfinite import FirstLayers, Guard, trace_layers
from hpc_parallel.training.observers import Observers
from hpc_parallel.training.optimizer import ModelOptimizer
from hpc_parallel.training.read_ahead import ReadAhead


def local_bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of `tensors` that this rank holds; for a DTensor, the bytes of the local shard."""
    return sum(local_of(tensor).nbytes for tensor in tensors)


def _written(value: Any) -> tuple[Any, int]:
    """What shows later whether a number or tensor was replaced, and how often the tensor was written."""
    if not isinstance(value, Tensor):
        return value, 0
    return weakref.ref(value), 0 if value.is_inference() else version_of(value)


class Step:
    """One optimizer step of this rank."""

    def __init__(
        self,
        assembled: Assembled,
        *,
        optimizer: ModelOptimizer,
        clip_norm: float | None,
        on_nonfinite: str = "stop",
        on_gradients: Callable[[], None] | None = None,
    ) -> None:
        """`on_nonfinite`: stop, skip or rollback; what to do if a step's gradient is not finite.

        `on_gradients` is called in each step when `.grad` is complete, before it is clipped. With a parameter
        server, it is called only on the server.
        """
        self._schedule = assembled.forward_backward  # microbatches, or a pipeline's schedule
        self._server = assembled.server  # None without a parameter server
        self._updates = self._server is None or self._server.serves
        self._assembled = assembled
        self._parameters = [parameter for part in assembled.parts for parameter in part.parameters()]
        self._sample_indices = assembled.parts[0].sample_indices
        copies = set(map(id, self._schedule.copies))
        self._gradient_norm = GradientNorm(
            [parameter for parameter in self._parameters if id(parameter) not in copies],
            axes=weight_axes(assembled.mesh),
        )
        names = {id(parameter): name for name, parameter in assembled.named_parameters().items()}
        self._loss_scale = assembled.loss_scale  # for float16
        saved = statistics(assembled)
        self._unsaved = {
            name: (buffer, version_of(buffer))
            for name, buffer in self._buffers().items()
            if name not in saved and not name.endswith(STATISTICS)
        }
        axes, place = assembled.mesh.mesh_dim_names or (), assembled.mesh.get_coordinate() or [1]
        # One rank of each stage warns of what no checkpoint has.
        warns = not any(at for axis, at in zip(axes, place, strict=False) if axis != "pipeline")
        # Plain attributes after the first step; empty if nobody looks at them any more.
        self._kept: dict[str, tuple[Any, int]] | None = None if warns else {}
        self._guard = Guard(
            {names[id(parameter)]: parameter for parameter in self._gradient_norm.counted},
            optimizer=optimizer, policy=on_nonfinite, buffers=list(saved.values()),
            loss_scale=self._loss_scale,
        )  # fmt: skip
        self._optimizer, self._clip_norm, self._on_gradients = optimizer, clip_norm, on_gradients
        self._held_bytes: dict[str, int] = {}  # `parameters` and `gradients`; empty before the first step

    def train(self, step: int, *, batches: ReadAhead, observers: Observers) -> StepResult:
        """Fetch the batch of the 1-based `step` and run the step on it."""
        with observers.around("data", step):
            inputs, targets = self._begin(batches.next(step - 1))
        with observers.around("step", step):
            result = self.run(inputs, targets)
        self._warn_of_unsaved()
        return result

    def _begin(self, batch: Batch) -> tuple[Tensor, Tensor]:
        if self._sample_indices.used:  # by dropout
            self._sample_indices.begin_batch(batch.indices, device=batch.inputs.device)
        return batch.inputs, batch.targets

    def run(self, inputs: Tensor, targets: Tensor) -> StepResult:
        """Train on this replica's batch `[batch, ...]` and update the weights."""
        loss = self._forward_backward(inputs, targets)
        if self._server is not None:
            self._server.collect()  # the gradients of all workers, to the server
        norm = self._update(loss) if self._updates else torch.zeros_like(loss)
        if self._server is not None:
            self._server.hand_out()  # the weights, to all workers
            self._server.share([] if self._loss_scale is None else self._loss_scale.state().values())
        return StepResult(loss=loss, gradient_norm=norm, skipped=self._guard.skipped)

    def _forward_backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Add the gradients of the mean loss to `.grad`, averaged over replicas; returns the mean loss.

        For each microbatch: `loss = model.loss(model(inputs), targets) / terms`, then `loss.backward()`.
        """
        self._guard.remember_buffers()
        try:
            loss = self._schedule.train(inputs, targets)
        except Exception as error:
            mark(error, place_in_backward(error, parts=self._assembled.parts) or "the loss")
            raise
        if not self._updates:
            self._count_bytes()  # a worker's gradients go to the server
        return loss

    def _update(self, loss: Tensor) -> Tensor:
        """Clip the gradients and update the weights; returns the gradient's norm before clipping."""
        try:
            self._count_bytes()
            if self._loss_scale is not None:
                self._loss_scale.unscale(local_gradients(self._parameters))
            norm, norms = self._gradient_norm()  # of the model, and of each weight of this rank
            # If they are not finite, the optimizer skips the step.
            self._guard.note(norm=norm, norms=norms, loss=loss)
            if self._on_gradients is not None:
                self._on_gradients()
            if self._clip_norm is not None:
                clip(self._parameters, norm=norm, max_norm=self._clip_norm)
            with marked("optimizer"):
                self._optimizer.step()
            self._optimizer.zero_grad()
            return norm
        except Exception as error:
            mark(error, "the optimizer")
            raise

    def _count_bytes(self) -> None:
        """Count once, in the first step, when the gradients of this rank are complete."""
        if not self._held_bytes:
            gradients = [weight.grad for weight in self._parameters if weight.grad is not None]
            self._held_bytes = {
                "parameters": local_bytes(self._parameters), "gradients": local_bytes(gradients)
            }  # fmt: skip

    def state_by_rank(self) -> list[dict[str, int]] | None:
        """`rank_state_bytes` of `summary.json`; None if this start has trained no step.

        Returns the same on all ranks, which must call it together.
        """
        if not self._held_bytes:
            return None
        optimizer_bytes = local_bytes(self._optimizer.state().values())
        return all_gather({**self._held_bytes, "optimizer": optimizer_bytes})

    def _buffers(self) -> dict[str, Tensor]:
        return dict(pair for part in self._assembled.parts for pair in part.named_buffers())

    def _attributes(self) -> dict[str, tuple[Any, int]]:
        """The plain attributes of all modules that are numbers or tensors, as `_written` has them.

        A tensor that depends on weights is left out, because it is of one step only.
        """
        return {
            f"{path}.{name}".lstrip("."): _written(value)
            for part in self._assembled.parts
            for path, module in part.named_modules()
            for name, value in vars(module).items()
            if isinstance(value, int | float) or (isinstance(value, Tensor) and value.grad_fn is None)
        }

    def _warn_of_unsaved(self) -> None:
        """Warn once of what a step writes and no checkpoint has: buffers and plain attributes.

        A buffer, which may be a cache, after the first step. An attribute only if the second step has changed
        it, because the first may fill a cache.
        """
        if self._kept == {}:
            return
        now, attributes = self._buffers(), self._attributes()
        for name, (buffer, version) in self._unsaved.items():
            if now.get(name) is not buffer or version_of(buffer) != version:
                rule = "is written in a step, and no checkpoint has it (persistent=False)"
                print_warning(f"the buffer {name} {rule}: a resume begins with its first value")
        self._unsaved = {}
        if self._kept is None:
            self._kept = attributes
            return
        for name, (value, version) in self._kept.items():
            other, now_version = attributes.get(name, (None, 0))
            same = value is other or value == other or (value != value and other != other)
            if not same or version != now_version:
                rule = "changes between steps, and no checkpoint has it: a resume begins with its first value"
                print_warning(f"the attribute {name} {rule}. If a step reads it, make it a buffer")
        self._kept = {}

    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the sums over this replica's batch, as `ForwardBackward.evaluate` does."""
        for part in self._assembled.parts:
            part.eval()
        sums = self._schedule.evaluate(inputs, targets)
        for part in self._assembled.parts:
            part.train()
        return sums

    def raise_if_nonfinite(self, step: int, *, batches: ReadAhead) -> None:
        """Call `Guard.raise_if_nonfinite`. `batches`: those of `train`, to run the first bad step again."""

        def trace_step(bad_step: int) -> FirstLayers:
            replay = partial(self._schedule.train, *self._begin(batches.again(bad_step - 1)))
            made = self._assembled
            return trace_layers(made.parts, compiled=made.compiled, whole=made.in_one_graph, replay=replay)

        self._guard.raise_if_nonfinite(step, trace=trace_step)
