"""Pipeline parallelism: blocks cut into stages, microbatches that keep them busy (Huang et al. 2019)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from hpc_parallel import torch_internals
from hpc_parallel.config.checks.pipeline_checks import version_problem
from hpc_parallel.config.schedules import SCHEDULES
from hpc_parallel.models.layered import LayeredModel, Loss
from hpc_parallel.problems import ConfigError
from hpc_parallel.strategies.forward_backward import propagate_nonfinite
from hpc_parallel.strategies.replicate import Average
from hpc_parallel.strategies.tied_ends import TiedEnds

BUSY = "pipeline stage"  # the profiler's range for a stage's work on one microbatch
KINDS = {
    "naive": ScheduleGPipe,  # of one microbatch, again and again
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "looped_bfs": ScheduleLoopedBFS,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


def busy(stage: int, kind: str, microbatch: int | None = None) -> AbstractContextManager[object]:
    """Marks a stage's work for a profiler (profiling/timeline.py); nothing where none is there.

    kind: forward, loss, backward (of inputs and weights, or of inputs alone), weights (their gradients,
    where a schedule puts them off), average (over replicas).
    """
    if not torch_internals.profiler_is_on():
        return nullcontext()
    return record_function(f"{BUSY} {stage} {kind}" + ("" if microbatch is None else f" {microbatch}"))


class Stage(PipelineStage):
    """A stage that says when it is busy, and is in training mode only from its first microbatch on.

    Before, torch runs it to learn its shapes, on memory of any content (again whenever training and
    evaluation take turns); in evaluation mode that can't reach running statistics.
    """

    gradients_go_on = False
    """Whether the schedule runs again before the optimizer does: replicas wait for the last time."""
    average: Average | None = None
    """Averages gradients over replicas that no DistributedDataParallel wraps."""
    passed = 0
    """Microbatches of this step that went through in earlier passes of the schedule."""

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        if self.has_backward and not self.submod.training:
            self.submod.train()
        with busy(self.stage_index, "forward", self.passed + fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *arguments, **options)

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **options: Any) -> None:
        if self.gradients_go_on:
            options["last_backward"] = False
        with busy(self.stage_index, "backward", self.passed + bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, *arguments, **options)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **options: Any) -> None:
        with busy(self.stage_index, "weights", self.passed + bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, *arguments, **options)

    # In evaluation torch 2.13 hands gradients between two stages of one rank all the same, and then refuses.
    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else None

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def perform_reduce_grad(self, *arguments: Any) -> None:
        """Called by the schedule when the last gradient of the stage is there, in evaluation too."""
        if self.gradients_go_on:
            return
        with busy(self.stage_index, "average"):
            super().perform_reduce_grad(*arguments)
        if self.has_backward:
            lay_out_gradients(self.submod)
            if self.average is not None:
                self.average.start()


def lay_out_gradients(module: Module) -> None:
    """Give gradients the strides of their weights, as backward() does and a split backward pass doesn't.

    The fused AdamW of torch 2.13 reads both alike on CPUs, whatever their strides.
    """
    for weight in module.parameters():
        if weight.grad is not None and weight.grad.stride() != weight.stride():
            weight.grad = torch.empty_like(weight).copy_(weight.grad)


class Pipeline:
    """Drives this rank's stages through a schedule of torch.distributed.pipelining."""

    def __init__(
        self,
        runners: Sequence[Module],
        *,
        stages: Sequence[LayeredModel],
        loss: Loss,
        indices: Sequence[int],
        mesh: DeviceMesh,
        replicas: DeviceMesh | None,
        schedule: str,
        microbatches: int,
        device: torch.device,
    ) -> None:
        """`runners` are the `stages`, wrapped by what else applies to them (DistributedDataParallel);
        `replicas`: the axis over which their gradients are still to be averaged.

        Raises ConfigError where torch is too old for the schedule.
        """
        if problem := version_problem(schedule):
            raise ConfigError([problem])
        for runner in runners:
            if isinstance(runner, DistributedDataParallel):
                # Else the forward pass by which torch learns shapes averages with the first microbatch too.
                # If the last one's gradients follow before another forward pass, the reducer fails (torch
                # 2.13; gpipe, looped_bfs).
                torch_internals.leave_averaging_to_the_caller(runner)
        axis = mesh["pipeline"]
        count = axis.size() * len(stages)
        self._parts = [
            Stage(runner, index, count, device, group=axis.get_group())
            for runner, index in zip(runners, indices, strict=True)
        ]
        self._averages = [] if replicas is None else [Average(stage, axis=replicas) for stage in stages]
        for part, average in zip(self._parts, self._averages, strict=False):
            part.average = average
        self._model = stages[-1]
        self._loss = loss
        self._terms = 1
        self._first = indices[0] == 0
        self._last = indices[-1] == count - 1
        self._device = device
        self._tied = TiedEnds(stages, mesh=mesh, v_shaped=SCHEDULES[schedule].v_shaped)
        self.copies: Sequence[Parameter] = self._tied.copies
        self._passes = microbatches if SCHEDULES[schedule].in_turn else 1
        self._each = microbatches // self._passes
        kind = KINDS[schedule]
        wanted = inspect.signature(kind).parameters  # the arguments move between releases of torch
        given = {
            "n_microbatches": self._each,
            "loss_fn": self._mean_loss,
            "scale_grads": False,
            "stage" if "stage" in wanted else "stages": self._parts[0] if "stage" in wanted else self._parts,
        }
        self._schedule = kind(**given)

    def _mean_loss(self, output: Tensor, target: Tensor) -> Tensor:
        with busy(self._parts[-1].stage_index, "loss"):
            return propagate_nonfinite(self._loss(output, target) / self._terms)

    def train(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of this pipeline's batch where the last stage lives, else zero."""
        loss = self._run(self._schedule.step, inputs, targets)
        for average in self._averages:
            average.finish()
        self._tied.sum_gradients()
        return loss

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The same, forward only."""
        return self._run(self._schedule.eval, inputs, targets)

    def _run(self, execute: Callable[..., object], inputs: Tensor, targets: Tensor) -> Tensor:
        self._tied.follow()
        for part in self._parts:
            part.submod.eval()
        self._terms = self._model.loss_terms(targets)
        found: list[Tensor] = []
        passes = zip(inputs.chunk(self._passes), targets.chunk(self._passes), strict=True)
        for index, (samples, expected) in enumerate(passes):
            for part in self._parts:
                part.gradients_go_on = index < self._passes - 1
                part.passed = index * self._each
            given = (samples,) if self._first else ()
            losses: list[Tensor] = []
            if self._last:
                execute(*given, target=expected, losses=losses, return_outputs=False)
            else:
                execute(*given)
            found.extend(loss.detach() for loss in losses)
        return torch.stack(found).sum() if found else torch.zeros((), device=self._device)
