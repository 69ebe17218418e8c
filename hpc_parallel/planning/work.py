"""What the devices do in one training step of a decoder, and of a configured run, as far as it is planned."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.layout.batch_plan import Plan
from hpc_parallel.layout.counts import (
    MIB,
    DecoderSizes,
    class_path,
    count,
    decoder_sizes,
    sequence_length,
    trains,
)
from hpc_parallel.layout.holdings import sliced_over
from hpc_parallel.layout.layout import DATAPARALLEL, PARAMETER_SERVER, Layout, servers
from hpc_parallel.layout.model_weights import ModelWeights, weights_of
from hpc_parallel.layout.schedules import schedule_of, stages_per_rank
from hpc_parallel.layout.step_facts import OFF, packs, types_of
from hpc_parallel.planning.hardware import FITTED_BY, MEASURED_BY, NOT_CALIBRATED, Hardware
from hpc_parallel.planning.operations import FLOAT8, NUMBER_BYTES, Rounding
from hpc_parallel.planning.pipeline_orders import Pipeline
from hpc_parallel.planning.planned_state import Division
from hpc_parallel.problems import Problem, Problems

UNPLANNED_AXES = ("tile",)


@dataclass(frozen=True)
class Work:
    """One step.

    data: the number of parts of the batch. context: the number of parts of a sequence, whose devices exchange
    keys and values by `attention`. shard: how many consecutive devices with the same weights slice them
    (ZeRO-3); with `expert`, the devices that slice all but the experts. recomputations: how often blocks run
    forward again in the backward pass, in each half of a split one (the first stage has one half, but waits).
    blocking: a stage waits until its message has arrived. bucket_bytes: the size of the messages that average
    gradients during the backward pass of the last microbatch; None: they are averaged after it. blocks: the
    number of blocks in each stage. stream_bytes: the bytes of a number that one stage sends to the next.
    gradient_bytes: the bytes of a number in the gradients that devices exchange. compressed: the means of
    gradients are exchanged in bfloat16 instead. rounding: how the blocks' linear products round to float8.
    workers: how many ranks send gradients to a parameter server, which is one more device or the first of
    `data`; 0 without a server. expert: how many consecutive devices split the experts; each of them has a
    part of the batch. compiled: torch.compile compiles blocks and loss. loads: each step sums the load of
    each expert.
    """

    decoder: DecoderSizes
    tensor: int
    data: int
    pipeline: int
    microbatch_size: int
    microbatches: int
    blocks: tuple[int, ...]
    precision: str = "float16"
    schedule: str = "1f1b"
    per_rank: int = 1
    recomputations: int = 1
    blocking: bool = True
    shard: int = 1
    stream_bytes: int = 2
    gradient_bytes: int = 2
    bucket_bytes: float | None = None
    context: int = 1
    attention: str = "ring"
    compressed: bool = False
    rounding: Rounding | None = None
    sequence_parallel: bool = True
    workers: int = 0
    expert: int = 1
    compiled: bool = False
    loads: bool = False

    @property
    def repeated_sums(self) -> float:
        """How many of a block's two sums over the tensor axis each recomputation repeats.

        torch stops at the last number that it needs, before it sums the block's result. With
        `sequence_parallel`, it has gathered the parts of the sequence by then. Megatron repeats both sums.
        """
        return 2.0 if self.blocking else 1.5 if self.sequence_parallel else 1.0

    @property
    def alike(self) -> int:
        """The devices that hold the same weights, or slices of them."""
        return self.data * self.context

    @property
    def computing(self) -> int:
        """The devices with a part of the batch."""
        return self.tensor * self.alike * self.pipeline

    @property
    def devices(self) -> int:
        """All devices: the computing ones, and a server that only serves."""
        return self.computing + (self.workers == self.data)

    @property
    def number_bytes(self) -> int:
        """Bytes of one number of the inputs of matrix products, and of gathered weights."""
        return NUMBER_BYTES[self.precision]

    @property
    def samples(self) -> int:
        return self.data * self.microbatches * self.microbatch_size

    @property
    def ranks(self) -> Pipeline:
        """The ranks of the pipeline, with their stages and the order of their actions."""
        return Pipeline(self.schedule, self.pipeline, self.microbatches, self.per_rank)

    @property
    def stages_of_ranks(self) -> list[list[int]]:
        return [self.ranks.stages_of(rank) for rank in range(self.pipeline)]

    @property
    def held_experts(self) -> float:
        """The weights of one block's experts that a device of the expert axis has, before any other split."""
        return self.decoder.expert_weights * self.decoder.experts / self.expert

    @property
    def expert_slices(self) -> int:
        """How many devices slice these experts."""
        return max(1, self.shard // self.expert)

    @property
    def sliced_weights(self) -> float:
        """The weights of a block that `shard` devices slice: without split experts."""
        return self.decoder.weights_with(self.decoder.experts if self.expert == 1 else 0)

    def rank_weights(self, stages: list[int]) -> float:
        """The weights on all devices of a pipeline rank; of split experts, only the part of one device."""
        return self._weights_with(self.decoder.experts / self.expert, stages)

    def averaged_weights(self, stages: list[int]) -> float:
        """The weights whose gradients all replicas average: without split experts."""
        return self._weights_with(None if self.expert == 1 else 0, stages)

    def _weights_with(self, experts: float | None, stages: list[int]) -> float:
        first, last = 0 in stages, len(self.blocks) - 1 in stages
        blocks = sum(self.blocks[stage] for stage in stages)
        return self.decoder.stage_weights(blocks, first=first, last=last, experts=experts)


def unplanned(config: RunConfig, layout: Layout, hardware: Hardware) -> Problems:
    """Why a checked configuration can't be planned."""
    if not trains(config):
        yield Problem("task", config.task.name, "is not planned, only training is", ("train",))
    if config.gpus_per_node > hardware.node.devices:
        devices = hardware.node.devices
        yield Problem(
            "gpus_per_node", config.gpus_per_node, f"is more than the hardware's {devices}", (devices,)
        )
    if config.strategy.execution == DATAPARALLEL:
        yield Problem(
            "strategy", config.strategy.name, "is not planned: it is no layout of devices", ("data",)
        )
    for axis in UNPLANNED_AXES:
        if layout.degrees[axis] > 1:
            yield Problem(f"strategy.{axis}", layout.degrees[axis], "is not planned yet", (1,))
    if config.strategy.shares is not None:
        yield Problem(
            "strategy.shares", config.strategy.shares, "is not planned, only even parts are", (None,)
        )
    if decoder_sizes(config) is None:
        target = class_path(config.model)
        yield f"model: the class {target} is not planned, only the reference decoders are. Try model=1b."
    if sequence_length(config) is None:
        yield "data: the length of a sequence is not known. Try data=text."
    if config.training.precision not in hardware.device.peak_flops:
        legal = tuple(name for name in hardware.device.peak_flops if name != FLOAT8)
        yield Problem(
            "training.precision", config.training.precision, "has no peak in the hardware's file", legal
        )
    if config.training.fp8 != OFF and FLOAT8 not in hardware.device.peak_flops:
        rule = f"has no peak in the hardware's file (device.peak_flops: {FLOAT8})"
        yield Problem("training.fp8", config.training.fp8, rule, (OFF,))


def unsearched(config: RunConfig) -> Problems:
    """Why the layouts of a configuration that `unplanned` accepts can't be compared."""
    if count(config, "experts")[1] is not None:
        yield (
            "model: the layouts of a mixture of experts are not searched, because expert is not looked at. "
            "Try plan strategy=expert, and plan strategy=data."
        )


def work_of_run(config: RunConfig, *, model: ModelWeights | None = None) -> Work:
    """The step of a configuration that `unplanned` accepts. model: the model's weights, if known already."""
    plan = Plan.of(config)
    layout, batch = plan.layout, plan.batch
    ddp, types = not layout.by_fully_shard, types_of(config, layout)
    apart = layout.pipeline > 1 and schedule_of(config.strategy).splits_backward
    sizes = decoder_sizes(config)
    assert sizes is not None  # the reference decoder
    return Work(
        sizes,
        tensor=layout.tensor,
        data=layout.data,
        pipeline=layout.pipeline,
        microbatch_size=batch.microbatch_size,
        microbatches=batch.microbatches,
        blocks=_blocks(config, layout, model),
        precision=config.training.precision,
        schedule=config.strategy.schedule,
        per_rank=stages_per_rank(config.strategy) if layout.pipeline > 1 else 1,
        recomputations=(config.training.activation_checkpointing == "full") * (1 + apart),
        blocking=False,
        shard=math.prod(layout.degrees[axis] for axis in sliced_over(layout)),
        stream_bytes=types.stream,
        gradient_bytes=types.precise,
        bucket_bytes=config.strategy.bucket_mb * MIB if ddp else 0.0,
        context=layout.context,
        attention=config.strategy.context_attention,
        rounding=_rounding(config, apart=apart),
        sequence_parallel=config.strategy.sequence_parallel,
        workers=_workers(config, layout),
        expert=layout.expert,
        compiled=config.training.compile,
        loads=bool(config.model.get("balance_step")),
        compressed=ddp and config.strategy.gradient_compression == "bfloat16",
    )


def _workers(config: RunConfig, layout: Layout) -> int:
    """The ranks that exchange gradients and weights with a parameter server."""
    if config.strategy.execution != PARAMETER_SERVER:
        return 0
    return layout.data - 1 + servers(config.strategy)


def _rounding(config: RunConfig, *, apart: bool) -> Rounding | None:
    training = config.training
    if training.fp8 == OFF:
        return None
    return Rounding(training.fp8 == "rowwise", fused=training.compile, apart=apart)


def _blocks(config: RunConfig, layout: Layout, model: ModelWeights | None) -> tuple[int, ...]:
    """The number of blocks of each stage, as the run divides them."""
    model = model or weights_of(config.model, sample_shape=(sequence_length(config) or 0,))
    assert model is not None  # the reference decoder
    return tuple(map(len, Division(config, layout, model).blocks))


def assumptions(config: RunConfig, hardware: Hardware) -> Iterator[str]:
    yield "This is a prediction. Validation is not in it."
    yield _origin(hardware)
    if config.strategy.expert != 1:
        yield "The router is planned to use all experts alike: expect a longer step if it does not."
    if config.model.get("dense_layers"):
        yield "The time of each dense block is planned as that of a mixture of experts."
    if config.training.activation_checkpointing == "selective":
        yield "training.activation_checkpointing=selective is planned as none: expect a longer step."
    if config.training.compile:
        yield _compiled(config, hardware)
    if config.training.compile_whole:
        yield "training.compile_whole is planned as compiled blocks: expect a shorter step of a small model."
    if packs(config):
        yield "data.packing: attention is planned to compute all pairs of a sample, as under its mask."
        is_ring = config.strategy.context != 1 and config.strategy.context_attention == "ring"
        if is_ring and config.device != "cpu":
            yield "A ring of packed documents computes in float32 on a GPU: expect a longer step."
    if config.training.fp8 != OFF:
        yield "Two trainings in float8 were compared with plans (docs/plan.md). MFU: of the peak of bfloat16."


def _compiled(config: RunConfig, hardware: Hardware) -> str:
    share = hardware.traffic.compiled
    if share is not None:
        return (
            f"training.compile: elementwise work and loss move {share:.0%} of the bytes (traffic.compiled); "
            "launches are planned as without it."
        )
    but = ", but for the rounding to float8" if config.training.fp8 != OFF else ""
    return f"training.compile is planned as false{but}: expect a shorter step."


def _origin(hardware: Hardware) -> str:
    """Says which machine's runs the coefficients come from."""
    calibration = hardware.calibration
    if calibration is None:
        return f"This hardware is {NOT_CALIBRATED}. Expect larger errors."
    whose = "this machine: " if calibration.startswith((MEASURED_BY, FITTED_BY)) else ""
    return f"Its coefficients come from {whose}{calibration}."
