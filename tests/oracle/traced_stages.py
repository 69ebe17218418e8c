"""Microbatches through the stages of one rank, whose neighbours in the pipeline don't exist."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import Parameter

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.layout.axes import AVERAGED_AXES
from hpc_parallel.layout.layout import SPMD, Layout, layout_of
from hpc_parallel.layout.schedules import schedule_of, stages_of, stages_per_rank
from hpc_parallel.layout.step_facts import casts_once
from hpc_parallel.models.auxiliary_loss import auxiliary_losses
from hpc_parallel.models.layered import LayeredModel, as_tuple, stem_outputs
from hpc_parallel.problems import ConfigError
from hpc_parallel.strategies.assemble import Assembled
from hpc_parallel.strategies.gradients import local_gradients
from hpc_parallel.strategies.groups import Groups
from hpc_parallel.strategies.loss import propagate_nonfinite
from hpc_parallel.strategies.mesh import joint, slicing_axis
from hpc_parallel.strategies.pipeline import Stage, TiedEnds
from hpc_parallel.strategies.precision import HALF, WEIGHTS
from hpc_parallel.strategies.replicate import distributed_weights
from tests.oracle.saved_tensors import SavedTensors
from tests.oracle.traced_traffic import GroupTraffic


class Stages:
    """A schedule that takes each microbatch through each stage of this rank, forward and backward.

    It counts the messages that it would send to the stages of other ranks. torch's own schedules can't run
    here, because they read numbers.
    """

    copies: Sequence[Parameter] = ()

    def __init__(
        self,
        assembled: Assembled,
        *,
        states: dict[str, list[torch.Size]],
        groups: Groups,
        config: RunConfig,
        microbatches: int,
        traffic: GroupTraffic,
    ) -> None:
        """`states`: what `states_between` returned.

        `activations`: the bytes of the first microbatch, by stage.
        """
        self.activations: list[int] = []
        self._assembled, self._states = assembled, states
        self._config, self._microbatches, self._traffic = config, microbatches, traffic
        self._layout: Layout = layout_of(config.strategy, devices=config.devices)
        self._tied: TiedEnds | None = None  # found here, because casts take the places of weights in a step
        if self._layout.pipeline > 1:
            v_shaped = schedule_of(config.strategy).v_shaped
            self._tied = TiedEnds(assembled.parts, group=groups.ends, v_shaped=v_shaped)

    def train(self, inputs: Tensor, targets: Tensor) -> Tensor:
        parts = self._assembled.parts
        for auxiliary in auxiliary_losses(parts):
            auxiliary.loss_terms = 1.0
        pieces = zip(inputs.chunk(self._microbatches), targets.chunk(self._microbatches), strict=True)
        for index, (samples, expected) in enumerate(pieces):
            self._traffic.begin_microbatch()
            for stage, part in zip(self._numbers(), parts, strict=True):
                if part.sample_indices.used:
                    part.sample_indices.begin_microbatch(index, count=self._microbatches)
                self._let_gradients_wait(part)
                kept = self._pass(part, samples, expected, stage=stage)
                if index == 0:
                    self.activations.append(kept)
        self._sum_slices()
        if self._tied is not None:
            self._tied.sum_gradients()
        return inputs.new_zeros((), dtype=torch.float32)

    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        raise NotImplementedError("a plan trains only")

    def _numbers(self) -> list[int]:
        """The numbers of this rank's stages."""
        if self._layout.pipeline == 1:
            return [0]
        strategy, place = self._config.strategy, self._assembled.mesh["pipeline"].get_local_rank()
        return stages_of(
            place, degree=self._layout.pipeline, per_rank=stages_per_rank(strategy),
            v_shaped=schedule_of(strategy).v_shaped,
        )  # fmt: skip

    def _let_gradients_wait(self, part: LayeredModel) -> None:
        """Let fully_shard gather weights once, and sum gradients at the end, as torch's pipelines do."""
        sliced: Any = part
        if isinstance(part, FSDPModule) and self._layout.pipeline > 1:
            sliced.set_is_last_backward(False)
            sliced.set_reshard_after_backward(False)
            sliced.set_requires_gradient_sync(False)

    def _pass(self, part: LayeredModel, samples: Tensor, targets: Tensor, *, stage: int) -> int:
        """Take one microbatch through a stage. Returns the bytes that the stage keeps."""
        saved, inputs = SavedTensors([part]), self._inputs(part, samples)
        with saved.watch():
            outputs = as_tuple(part(*inputs))
            if part.head is not None:
                loss = self._assembled.evaluation(outputs[0], targets)
                outputs = (propagate_nonfinite(loss),)
        needing = [output for output in outputs if output.requires_grad]
        torch.autograd.backward(needing, [torch.ones_like(output) for output in needing])
        if part.head is None:
            self._send(outputs, to_stage=stage + 1)
        if part.stem is None:
            self._send([tensor.grad for tensor in inputs if tensor.grad is not None], to_stage=stage - 1)
        return saved.bytes

    def _send(self, tensors: Sequence[Tensor], *, to_stage: int) -> None:
        """Count a message to the rank of a stage, unless it is this rank."""
        if to_stage not in self._numbers():
            group = dist.get_process_group_ranks(self._assembled.mesh["pipeline"].get_group())
            for tensor in tensors:
                self._traffic.note("send", tensor.nbytes, ranks=group)

    @torch.no_grad()
    def average(self) -> None:
        """Average the gradients that DistributedDataParallel or `Average` averages, one message per stage."""
        if self._config.strategy.execution != SPMD:
            return
        mesh = self._assembled.mesh
        axis = joint(mesh, *AVERAGED_AXES) if slicing_axis(mesh) is None else None
        if axis is None:
            return
        for part in self._assembled.parts:
            left_out = {*distributed_weights(part)}
            weights = [weight for name, weight in part.named_parameters() if name not in left_out]
            message = torch.cat([gradient.reshape(-1) for gradient in local_gradients(weights)])
            if self._config.strategy.gradient_compression == "bfloat16":
                message = message.to(torch.bfloat16)
            dist.all_reduce(message, group=axis.get_group())

    def _sum_slices(self) -> None:
        """Sum the gradients that `_let_gradients_wait` has held back."""
        for stage, part in zip(self._numbers(), self._assembled.parts, strict=True):
            if isinstance(part, FSDPModule) and self._layout.pipeline > 1:
                axis = self._assembled.mesh["pipeline"]
                stages = axis.size() * len(self._assembled.parts)
                device = torch.device("cpu")
                Stage(part, stage, stages, device, group=axis.get_group()).perform_reduce_grad(1)

    def _inputs(self, part: LayeredModel, inputs: Tensor) -> tuple[Tensor, ...]:
        """The inputs of a stage, in the type that the previous stage sends."""
        if part.stem is not None:
            return (inputs,)
        precision = self._config.training.precision
        cast = casts_once(self._config) or (self._layout.by_fully_shard and precision in HALF)
        dtype = HALF[precision] if cast else WEIGHTS[precision]
        shapes = [self._local(shape, inputs) for shape in self._states[next(iter(part.blocks))]]
        return tuple(torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in shapes)

    def _local(self, shape: torch.Size, inputs: Tensor) -> torch.Size:
        """The shape of this rank's part of a state of the whole sequence."""
        if self._layout.tile > 1:
            raise ConfigError(["strategy.tile in a pipeline is not measured."])
        if inputs.dim() != 2:
            return shape
        length = inputs.shape[1]
        if self._config.strategy.sequence_parallel:
            length //= self._layout.tensor
        return torch.Size((shape[0], length, *shape[2:]))


def states_between(model: LayeredModel, inputs: Tensor) -> dict[str, list[torch.Size]]:
    """The shapes of the inputs of each block of the whole `model`, which is on meta, for meta `inputs`."""
    shapes: dict[str, list[torch.Size]] = {}
    state = (inputs,) if model.stem is None else stem_outputs(model, inputs)
    for name, block in model.blocks.items():
        shapes[name] = [tensor.shape for tensor in state]
        if inputs.dim() > 2:  # blocks of language models keep the shape
            state = as_tuple(block(*state))
    return shapes
