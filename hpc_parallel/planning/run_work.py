"""The step of a configured run, as far as a plan knows how to time it."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hpc_parallel.config.checks.training_checks import OFF
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.layout.batch_plan import Plan
from hpc_parallel.layout.counts import MIB, class_path, count, parameters, sequence_length, trains
from hpc_parallel.layout.holdings import sliced_over
from hpc_parallel.layout.layout import DATAPARALLEL, PARAMETER_SERVER, Layout, servers
from hpc_parallel.layout.model_weights import ModelWeights, weights_of
from hpc_parallel.layout.schedules import stages_per_rank
from hpc_parallel.layout.step_facts import types_of
from hpc_parallel.planning.decoder import DecoderSizes
from hpc_parallel.planning.hardware import FITTED_BY, MEASURED_BY, NOT_CALIBRATED, Hardware
from hpc_parallel.planning.operations import FLOAT8, Rounding
from hpc_parallel.planning.planned_state import Division
from hpc_parallel.planning.work import Work
from hpc_parallel.problems import Problem, Problems

UNPLANNED_AXES = ("tile",)


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
    if parameters(config) is None:
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
    return Work(
        _decoder(config),
        tensor=layout.tensor,
        data=layout.data,
        pipeline=layout.pipeline,
        microbatch_size=batch.microbatch_size,
        microbatches=batch.microbatches,
        blocks=_blocks(config, layout, model),
        precision=config.training.precision,
        schedule=config.strategy.schedule,
        per_rank=stages_per_rank(config.strategy) if layout.pipeline > 1 else 1,
        recompute=config.training.activation_checkpointing == "full",
        blocking=False,
        shard=math.prod(layout.degrees[axis] for axis in sliced_over(layout)),
        stream_bytes=types.stream,
        gradient_bytes=types.precise,
        bucket_bytes=config.strategy.bucket_mb * MIB if ddp else 0.0,
        context=layout.context,
        attention=config.strategy.context_attention,
        rounding=_rounding(config),
        sequence_parallel=config.strategy.sequence_parallel,
        workers=_workers(config, layout),
        expert=layout.expert,
        compiled=config.training.compile,
        compressed=ddp and config.strategy.gradient_compression == "bfloat16",
    )


def _workers(config: RunConfig, layout: Layout) -> int:
    """The ranks that exchange gradients and weights with a parameter server."""
    if config.strategy.execution != PARAMETER_SERVER:
        return 0
    return layout.data - 1 + servers(config.strategy)


def _rounding(config: RunConfig) -> Rounding | None:
    training = config.training
    return None if training.fp8 == OFF else Rounding(training.fp8 == "rowwise", fused=training.compile)


def _blocks(config: RunConfig, layout: Layout, model: ModelWeights | None) -> tuple[int, ...]:
    """The number of blocks of each stage, as the run divides them."""
    model = model or weights_of(config.model, sample_shape=(sequence_length(config) or 0,))
    assert model is not None  # the reference decoder
    return tuple(map(len, Division(config, layout, model).blocks))


def assumptions(config: RunConfig, hardware: Hardware) -> Iterator[str]:
    """The assumptions of the plan of this configuration."""
    yield "This is a prediction. Validation is not in it."
    yield _origin(hardware)
    if config.strategy.expert != 1:
        yield "The router is planned to use all experts alike: expect a longer step if it does not."
    if config.training.activation_checkpointing == "selective":
        yield "training.activation_checkpointing=selective is planned as none: expect a longer step."
    if config.training.compile:
        yield _compiled(config, hardware)
    if config.training.compile_whole:
        yield "training.compile_whole is planned as compiled blocks: expect a shorter step of a small model."
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


def _decoder(config: RunConfig) -> DecoderSizes:
    sizes = {
        name: count(config, name)[1] or 0 for name in ("blocks", "heads", "kv_heads", "columns", "vocabulary")
    }
    experts = count(config, "experts")[1]
    return DecoderSizes(
        layers=sizes["blocks"],
        dim=config.model["dim"],
        heads=sizes["heads"],
        kv_heads=sizes["kv_heads"],
        ffn_dim=sizes["columns"],
        vocabulary=sizes["vocabulary"],
        sequence=sequence_length(config) or 0,
        ffn_matrices=3,
        flash=True,
        tied=config.model["tied_head"],
        experts=experts or 1,
        per_token=config.model["experts_per_token"] if experts else 1,
    )
