"""Pipeline parallelism: stages of blocks that process microbatches at the same time (Huang et al. 2019)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
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
from torch.utils.checkpoint import GraphExecGroup

from hpc_parallel import torch_internals
from hpc_parallel.layout.schedules import schedule_named, too_old, version_problem
from hpc_parallel.models.auxiliary_loss import auxiliary_losses
from hpc_parallel.models.drawn_weights import local_of
from hpc_parallel.models.layered import LayeredModel, Loss, part_of
from hpc_parallel.problems import ConfigError
from hpc_parallel.strategies.gradients import local_gradients
from hpc_parallel.strategies.groups import Groups
from hpc_parallel.strategies.loss import LossTerms, propagate_nonfinite
from hpc_parallel.strategies.ranges import action, marked
from hpc_parallel.strategies.replicate import Average

ENDS = {"stem", "head"}
# torch 2.11 expects a gradient of each input of a stage back, of a mask too; the stage before drops it.
_SENDS_EACH_GRADIENT = too_old((2, 12)) is not None
BUSY = "pipeline stage"  # the profiler's range for a stage's work on one microbatch
KINDS = {
    "naive": ScheduleGPipe,  # with one microbatch at a time
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "looped_bfs": ScheduleLoopedBFS,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


def busy(stage: int, kind: str, microbatch: int | None = None) -> AbstractContextManager[object]:
    """Mark a stage's work for the profiler, and for the timeline of a measured step, if one is on.

    `kind` is forward, loss, backward (of inputs and weights, or of inputs only), weights (their gradients, if
    the schedule delays them), or average (over replicas).
    """
    return action(f"{BUSY} {stage} {kind}" + ("" if microbatch is None else f" {microbatch}"))


class Stage(PipelineStage):
    """A stage that marks its work for the profiler and is in training mode only from its first microbatch on.

    Before that, torch runs the stage on uninitialised memory to learn its shapes, and again after each change
    between training and evaluation. In evaluation mode this run can't change running statistics.
    """

    more_passes = False
    """Whether the schedule runs again in this step: gradients are averaged over replicas in the last run."""
    average: Average | None = None
    """Averages gradients over replicas if no DistributedDataParallel wraps the stage."""
    gradients_group: dist.ProcessGroup | None = None
    """Carries the gradients between stages, if it is not the group that carries the activations."""
    first_microbatch = 0
    """Number of microbatches of this step in earlier runs of the schedule."""
    begin_microbatch: Callable[[int], None] | None = None
    """Called with the number of the microbatch before its forward pass in training, for dropout."""

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **options: Any) -> Any:
        if self.has_backward and not self.submod.training:
            self.submod.train()
        microbatch = self.first_microbatch + fwd_chunk_id
        if self.begin_microbatch is not None and self.submod.training:
            self.begin_microbatch(microbatch)
        with busy(self.stage_index, "forward", microbatch):
            return super().forward_one_chunk(fwd_chunk_id, *arguments, **options)

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **options: Any) -> None:
        if self.more_passes:
            options["last_backward"] = False
        inputs = self.fwd_cache[bwd_chunk_id][1]
        with busy(self.stage_index, "backward", self.first_microbatch + bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, *arguments, **options)
        for x in inputs:  # `bwd_cache` has what is sent; torch would keep these until the step ends
            x.grad = None
        if _SENDS_EACH_GRADIENT and self.has_backward and not self.is_first:
            sent = zip(self.bwd_cache[bwd_chunk_id], inputs, strict=False)  # `named` has no gradients
            self.bwd_cache[bwd_chunk_id] = tuple(torch.zeros_like(x) if g is None else g for g, x in sent)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **options: Any) -> None:
        """torch calls autograd for each group of weights. One recomputation of a block serves all groups."""
        with busy(self.stage_index, "weights", self.first_microbatch + bwd_chunk_id), GraphExecGroup():
            super().backward_weight_one_chunk(bwd_chunk_id, *arguments, **options)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._with_gradients_group(super().get_bwd_send_ops(bwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._with_gradients_group(super().get_bwd_recv_ops(bwd_chunk_id))

    def _with_gradients_group(self, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        """torch's stages have one group. `gradients_group` has the same ranks in the same order."""
        if self.gradients_group is not None:
            for operation in operations:
                operation.group = self.gradients_group
        return operations

    # torch 2.13 hands gradients between two stages of one rank in evaluation too, and then raises an error.
    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else None

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def perform_reduce_grad(self, *arguments: Any) -> None:
        """The schedule calls this after the last gradient of the stage, and in evaluation too."""
        if self.more_passes:
            return
        with busy(self.stage_index, "average"):
            super().perform_reduce_grad(*arguments)
        if self.has_backward and self.average is not None:
            self.average.start()


def delay_averaging(runners: Sequence[Module]) -> None:
    """Let DistributedDataParallel average only when the schedule asks for it.

    Otherwise the forward pass that learns the shapes makes the first microbatch average too. If the last
    microbatch's gradients then follow before another forward pass, the reducer fails (torch 2.13; gpipe,
    looped_bfs).
    """
    for runner in runners:
        if isinstance(runner, DistributedDataParallel):
            torch_internals.leave_averaging_to_the_caller(runner)


def contiguous_ends(
    forward: Callable[..., Any], stage: LayeredModel, *inputs: Tensor, **named: Tensor
) -> Any:
    """The forward pass of a stage whose outputs, and whose inputs' gradients, can be sent.

    torch's pipelines send tensors as they are, but backends send only contiguous tensors. A schedule that
    splits the backward pass detaches outputs in place. Views do not allow this, so an input that a stage only
    passes on is copied.
    """
    outputs = forward(
        stage, *(ContiguousGradient.apply(x) if x.requires_grad else x for x in inputs), **named
    )
    if isinstance(outputs, tuple):
        return tuple(map(sendable, outputs))
    return sendable(outputs)


def sendable(output: Tensor) -> Tensor:
    if torch_internals.is_view(output):
        return output.clone(memory_format=torch.contiguous_format)
    return output.contiguous()


class ContiguousGradient(torch.autograd.Function):
    """The same tensor; its gradient is contiguous.

    An input that a stage only passes on is also no longer a leaf of autograd. A leaf would give no gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()


class TiedEnds:
    """Tied weights of the first and last stage: each stage has a copy, and both stay equal.

    Parts that share any other weight are in one stage (`stages.divide`), which has this weight once.

    On two ranks, both copies get the sum of their gradients. On one rank, the optimizer updates only the
    original in the first stage, and the copy in the last stage gets its values. The two can't be one
    parameter, because fully_shard gathers each stage separately and could not slice a common parameter.
    """

    def __init__(
        self, stages: Sequence[LayeredModel], *, group: dist.ProcessGroup | None, v_shaped: bool
    ) -> None:
        """`group`: the group of the ranks of the first and of the last stage (`Groups.ends`).

        `v_shaped`: the first and the last stage are on one rank, in every pipeline.
        """
        pairs = [pair for stage in stages for pair in stage.tied.items()]
        names = {alias: name for alias, name in pairs if {part_of(alias), part_of(name)} == ENDS}
        local = dict(pair for stage in stages for pair in stage.named_parameters())
        self.copies = [local[alias] for alias in names if alias in local]  # in the last stage
        originals = [local[name] for name in names.values() if name in local]
        self._pairs = list(zip(self.copies, originals, strict=True)) if v_shaped else []
        self._shared = [] if v_shaped else self.copies or originals
        self._group = group

    @torch.no_grad()
    def copy_originals(self) -> None:
        """Copy the originals to this rank's copies, after the optimizer or a checkpoint has changed them."""
        for copy, original in self._pairs:
            local_of(copy).copy_(local_of(original))

    def sum_gradients(self) -> None:
        assert self._group is not None or not self._shared  # None would be the group of all ranks
        for gradient in local_gradients(self._shared):
            message = gradient.contiguous()  # the two may differ in strides, and messages have none
            with marked("all_reduce tied ends"):
                dist.all_reduce(message, group=self._group)
            if message is not gradient:
                gradient.copy_(message)
        for copy, original in self._pairs:
            gradients = zip(local_gradients([original]), local_gradients([copy]), strict=True)
            for original_gradient, copy_gradient in gradients:
                original_gradient.add_(copy_gradient)
            copy.grad = None


class PipelineDriver:
    """Drives this rank's stages through a schedule of torch.distributed.pipelining."""

    def __init__(
        self,
        runners: Sequence[Module],
        *,
        stages: Mapping[int, LayeredModel],
        loss: Loss,
        terms: LossTerms,
        groups: Groups,
        replicas: DeviceMesh | None,
        schedule: str,
        microbatches: int,
        device: torch.device,
    ) -> None:
        """Build the schedule of this rank's `stages`, by their index in the pipeline.

        `runners`: the stages, in DistributedDataParallel if it applies. `replicas`: the axis over which no
        wrapper averages gradients.

        Raises ConfigError if torch is too old for the schedule.
        """
        if problem := version_problem(schedule, legal=("interleaved" if len(stages) > 1 else "1f1b",)):
            raise ConfigError([problem])
        rules = schedule_named(schedule)
        kind = KINDS[schedule] if rules.file is None else torch_internals.schedule_of_actions()
        delay_averaging(runners)
        axis = groups.mesh["pipeline"]
        models, count = list(stages.values()), axis.size() * len(stages)
        self._parts = [
            Stage(runner, index, count, device, group=axis.get_group())
            for runner, index in zip(runners, stages, strict=True)
        ]
        self._averages = [] if replicas is None else [Average(model, axis=replicas) for model in models]
        for part, model in zip(self._parts, models, strict=True):
            part.gradients_group = groups.gradients if torch_internals.sends_apart(kind) else None
            if model.sample_indices.used:
                part.begin_microbatch = partial(model.sample_indices.begin_microbatch, count=microbatches)
        for part, average in zip(self._parts, self._averages, strict=False):
            part.average = average
        self._auxiliary_losses = auxiliary_losses(models)
        self._loss = loss
        self._count_terms = terms
        self._packs = models[0].packed_samples
        self._terms: float | Tensor = 1.0
        self._first = min(stages) == 0
        self._last = max(stages) == count - 1
        self._device = device
        self._tied = TiedEnds(models, group=groups.ends, v_shaped=rules.v_shaped)
        self.copies: Sequence[Parameter] = self._tied.copies
        self._passes = microbatches if rules.in_turn else 1
        self._per_pass = microbatches // self._passes
        self._schedule = self._build_schedule(kind)
        if rules.file is not None:
            torch_internals.set_actions(self._schedule, rules.file.ranks)

    def _build_schedule(self, kind: Callable[..., Any]) -> Any:
        single_stage = "stage" in inspect.signature(kind).parameters  # differs between releases of torch
        stages = {"stage": self._parts[0]} if single_stage else {"stages": self._parts}
        return kind(n_microbatches=self._per_pass, loss_fn=self._mean_loss, scale_grads=False, **stages)

    def _mean_loss(self, output: Tensor, target: Tensor) -> Tensor:
        with busy(self._parts[-1].stage_index, "loss"):
            return propagate_nonfinite(self._loss(output, target) / self._terms)

    def train(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean loss of this pipeline's batch on the rank of the last stage, otherwise zero."""
        loss = self._run(self._schedule.step, inputs, targets, terms=self._count_terms(targets))
        for average in self._averages:
            average.finish()
        self._tied.sum_gradients()
        return loss

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the sums of this pipeline's batch on the rank of the last stage, otherwise zero."""
        return self._run(self._schedule.eval, inputs, targets, terms=1.0)

    def _run(
        self, execute: Callable[..., object], inputs: Tensor, targets: Tensor, *, terms: float | Tensor
    ) -> Tensor:
        """Returns the sum over the microbatches of what the loss function returns, divided by `terms`."""
        self._tied.copy_originals()
        for part in self._parts:
            part.submod.eval()
        self._terms = terms
        for auxiliary in self._auxiliary_losses:
            auxiliary.loss_terms = self._terms
        all_losses: list[Tensor] = []
        passes = zip(inputs.chunk(self._passes), targets.chunk(self._passes), strict=True)
        for index, (samples, expected) in enumerate(passes):
            for part in self._parts:
                part.more_passes = index < self._passes - 1
                part.first_microbatch = index * self._per_pass
            stage_inputs = (samples,) if self._first else ()
            named = {"document_starts": samples[..., 1]} if self._packs and samples.dim() == 3 else {}
            losses: list[Tensor] = []
            if self._last:
                execute(*stage_inputs, target=expected, losses=losses, return_outputs=False, **named)
            else:
                execute(*stage_inputs, **named)
            all_losses.extend(loss.detach() for loss in losses)
        return torch.stack(all_losses).sum(0) if all_losses else torch.zeros((), device=self._device)
