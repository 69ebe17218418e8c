"""Pipeline parallelism: blocks cut into stages, microbatches that keep them busy (Huang et al. 2019).

Stages are balanced by the FLOPs of their blocks, the stem and the head counted where they stand.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn import Module, Parameter

from hpc_parallel.config.problems import ConfigError, Problem
from hpc_parallel.models.layered import LayeredModel, PartFlops, keep
from hpc_parallel.strategies.mesh import local_gradients

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}


def balance(flops: PartFlops, *, stages: int) -> list[range]:
    """The blocks of each stage, in order, so that the heaviest stage is as light as it can be.

    Raises ConfigError where there are more stages than blocks.
    """
    count = len(flops.blocks)
    if stages > count:
        rule = f"stages are more than the model's {count} blocks: each needs one"
        raise ConfigError([Problem("strategy.pipeline", stages, rule, (count,))])
    before = [0.0, *accumulate(flops.blocks)]

    def weight(start: int, end: int) -> float:
        ends = flops.stem * (start == 0) + flops.head * (end == count)
        return before[end] - before[start] + ends

    @cache
    def best(start: int, left: int) -> tuple[float, tuple[int, ...]]:
        """The lightest heaviest stage of blocks start.. in `left` stages, and where those end."""
        if left == 1:
            return weight(start, count), (count,)
        options = []
        for end in range(start + 1, count - left + 2):
            rest, cuts = best(end, left - 1)
            options.append((max(weight(start, end), rest), (end, *cuts)))
        return min(options)

    return [range(start, end) for start, end in pairwise((0, *best(0, stages)[1]))]


def stages_of(rank: int, *, degree: int, per_rank: int) -> list[int]:
    """Indices of a rank's stages: they go round the ranks `per_rank` times (Narayanan et al. 2021)."""
    return [rank + turn * degree for turn in range(per_rank)]


def cut(model: LayeredModel, *, blocks: range, first: bool, last: bool) -> LayeredModel:
    """Leave one stage of `model`, in place; the names of what stays don't change."""
    keep(model, blocks=blocks, stem=first, head=last)
    return model


class Stage(PipelineStage):
    """A stage that is in training mode only from its first microbatch on.

    Before, torch runs it to learn its shapes, on memory of any content (again whenever training and
    evaluation take turns); in evaluation mode that can't reach running statistics.
    """

    def forward_one_chunk(self, *arguments: Any, **options: Any) -> Any:
        if self.has_backward and not self.submod.training:
            self.submod.train()
        return super().forward_one_chunk(*arguments, **options)


class Pipeline:
    """Drives this rank's stages through a schedule of torch.distributed.pipelining."""

    def __init__(
        self,
        runners: Sequence[Module],
        *,
        stages: Sequence[LayeredModel],
        indices: Sequence[int],
        mesh: DeviceMesh,
        schedule: str,
        microbatches: int,
        device: torch.device,
    ) -> None:
        """`runners` are the `stages`, wrapped by what else applies to them (DistributedDataParallel)."""
        axis = mesh["pipeline"]
        count = axis.size() * len(stages)
        self._parts = [
            Stage(runner, index, count, device, group=axis.get_group())
            for runner, index in zip(runners, indices, strict=True)
        ]
        self._model = stages[-1]
        self._terms = 1
        self._first = indices[0] == 0
        self._last = indices[-1] == count - 1
        self._device = device
        self._tied = TiedEnds(stages, mesh=mesh)
        self.copies: Sequence[Parameter] = self._tied.copies
        kind = SCHEDULES[schedule]
        wanted = inspect.signature(kind).parameters  # the arguments move between releases of torch
        given = {
            "n_microbatches": microbatches,
            "loss_fn": self._loss,
            "scale_grads": False,
            "stage" if "stage" in wanted else "stages": self._parts[0] if "stage" in wanted else self._parts,
        }
        self._schedule = kind(**given)

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self._model.loss(output, target) / self._terms

    def train(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of this pipeline's batch where the last stage lives, else zero."""
        loss = self._run(self._schedule.step, inputs, targets)
        self._tied.sum_gradients()
        return loss

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The same, forward only."""
        return self._run(self._schedule.eval, inputs, targets)

    def _run(self, execute: Callable[..., object], inputs: Tensor, targets: Tensor) -> Tensor:
        losses: list[Tensor] = []
        for part in self._parts:
            part.submod.eval()
        self._terms = self._model.loss_terms(targets)
        given = (inputs,) if self._first else ()
        if self._last:
            execute(*given, target=targets, losses=losses, return_outputs=False)
        else:
            execute(*given)
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else self._zero()

    def _zero(self) -> Tensor:
        return torch.zeros((), device=self._device)


class TiedEnds:
    """Weights that the first and the last stage share: each has a copy, both get the sum of the gradients."""

    def __init__(self, stages: Sequence[LayeredModel], *, mesh: DeviceMesh) -> None:
        names = dict(pair for stage in stages for pair in stage.tied.items())
        here = dict(pair for stage in stages for pair in stage.named_parameters())
        self.copies = [here[alias] for alias in names if alias in here]  # held by the last stage
        self._shared = self.copies or [here[name] for name in names.values() if name in here]
        self._group = ends_group(mesh) if names else None

    def sum_gradients(self) -> None:
        for gradient in local_gradients(self._shared):
            dist.all_reduce(gradient, group=self._group)


def ends_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The group of this pipeline's first and last rank; None on the ranks between.

    Every rank of the world makes every pipeline's: NCCL splits a communicator only with all its ranks.
    """
    assert mesh.mesh_dim_names is not None
    dim = mesh.mesh_dim_names.index("pipeline")
    pipelines = mesh.mesh.movedim(dim, -1).reshape(-1, mesh.size(dim))  # [pipeline, stage's rank]
    mine = None
    for ranks in pipelines.tolist():
        ends = [ranks[0], ranks[-1]]
        group = dist.new_group(ends)
        if dist.get_rank() in ends:
            mine = group
    return mine
