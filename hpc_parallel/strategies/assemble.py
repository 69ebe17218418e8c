"""From a configuration to a model on this rank: the techniques, applied top to bottom in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module, Parameter

from hpc_parallel.config.schema import RunConfig, StrategyConfig
from hpc_parallel.layout.axes import AVERAGED_AXES, BATCH_AXES, SAMPLE_AXES
from hpc_parallel.layout.batch_plan import BatchPlan
from hpc_parallel.layout.layout import DATAPARALLEL, PARAMETER_SERVER, tile_grid
from hpc_parallel.layout.schedules import schedule_of
from hpc_parallel.layout.step_facts import casts_once
from hpc_parallel.models.auxiliary_loss import auxiliary_losses
from hpc_parallel.models.layered import LayeredModel, Loss, materialise
from hpc_parallel.strategies import (
    batch_norm,
    channels_last,
    checkpointing,
    chunked_loss,
    compiling,
    dataparallel,
    expert,
    float8,
    float8_scales,
    pipeline,
    precision,
    replicate,
    shard,
    stages,
    working_weights,
)
from hpc_parallel.strategies.context import split_sequence
from hpc_parallel.strategies.dropout import counted_dropout, dropout_shapes
from hpc_parallel.strategies.forward_backward import (
    Accumulate,
    ForwardBackward,
    InContext,
    SequenceParts,
    TensorGroup,
)
from hpc_parallel.strategies.groups import Groups
from hpc_parallel.strategies.loss import LossTerms, MetricsOf, TermsOf, WithMetrics, count_terms
from hpc_parallel.strategies.loss_scale import LossScale
from hpc_parallel.strategies.mesh import axis_of, data_mesh, joint, slicing_axis
from hpc_parallel.strategies.model_checks import is_own
from hpc_parallel.strategies.parameter_server import Idle, ParameterServer
from hpc_parallel.strategies.tensor import split_layers
from hpc_parallel.strategies.tile import split_image
from hpc_parallel.strategies.tile.tile_maps import Maps, measure


@dataclass(frozen=True)
class Assembled:
    """What this rank holds of the model, and how a batch goes through all of it."""

    parts: Sequence[LayeredModel]
    forward_backward: ForwardBackward
    build_schedule: Callable[[int], ForwardBackward]  # for another number of microbatches, of any size
    mesh: DeviceMesh
    forward_flops: float  # of the whole model, per sample
    evaluation: WithMetrics  # the loss function; knows the names of the model's metrics after an evaluation
    server: ParameterServer | None = None  # set if only the parameter server has the optimizer
    compiled: bool = False  # whether torch.compile compiles the blocks
    in_one_graph: bool = False  # whether it compiles the whole model as one graph
    loss_scale: LossScale | None = None  # only for float16
    traffic: Sequence[dataparallel.DeviceTraffic] | None = None  # if one process drives several devices

    def named_parameters(self) -> dict[str, Parameter]:
        """Parameters by full name. A tied weight that another rank also holds has its canonical name.

        If this rank holds both copies of a tied weight, only the original is listed.
        """
        canonical = {alias: name for part in self.parts for alias, name in part.tied.items()}
        for part in self.parts:
            shard.release(part)
        named = dict(item for part in self.parts for item in part.named_parameters())
        copies = {alias for alias, name in canonical.items() if name in named}
        return {
            canonical.get(name, name): parameter for name, parameter in named.items() if name not in copies
        }


def assemble(
    model: LayeredModel,
    *,
    config: RunConfig,
    batch: BatchPlan,
    sample_shape: tuple[int, ...],
    groups: Groups,
    device: torch.device,
    weight: float = 1.0,
    trains: bool = True,
) -> Assembled:
    """Apply the techniques to the whole `model`, which is on meta; `model_checks` must have found no problem.

    The order is: cut into stages, reorder images, split samples or layers, mask for dropout, float8,
    checkpoint, compile, set the precision, shard, materialise, replicate.
    Weights are materialised before replication, which needs real weights. They are materialised after every
    technique that decides which weights this rank needs. Each weight is drawn from (seed, its name), so no
    rank sends weights to another.
    Inference (not `trains`) needs no replication, which averages gradients. `weight`: the factor of this
    rank's mean loss (`BatchPlan.weight`).

    Raises ConfigError if the model can't be split as the strategy asks.
    """
    mesh = groups.mesh
    flops = model.forward_flops(sample_shape)
    maps = None
    if (axis := axis_of(mesh, "tile")) is not None:
        grid = tile_grid(axis.size(), config.strategy.tile_grid)
        maps = measure(model, sample_shape=sample_shape, grid=grid)
    chunked = chunked_loss.applies(model, config=config, mesh=mesh)
    shapes = dropout_shapes.whole_shapes(model, sample_shape=sample_shape)
    local_stages = cut(model, mesh=mesh, sample_shape=sample_shape, options=config.strategy)
    parts = list(local_stages.values())
    for part in parts:
        projection = chunked_loss.apply(part) if chunked else None
        channels_last.apply(part, precision=config.training.precision, device_type=device.type)
        split(part, mesh=mesh, maps=maps, options=config.strategy, chunked=projection)
        part.sample_indices = parts[0].sample_indices
        local_part = dropout_part(part, mesh=mesh, options=config.strategy)
        counted_dropout.apply(part, shapes=shapes, part=local_part, seed=config.seed, device=device)
        prepare(part, config=config, mesh=mesh, device=device)
        if not trains and casts_once(config) and slicing_axis(mesh) is None:
            working_weights.cast_for_good(part)
    replicas = replicate_parts(
        parts, config=config, batch=batch, mesh=mesh, device=device, trains=trains, chunked=chunked
    )
    loss_scale = scale_of(parts, config=config, device=device)
    of_floats = partial(precision.of_floats, precision=config.training.precision)
    loss, metrics = loss_of(model, mesh=mesh, options=config.strategy)
    loss, metrics = of_floats(loss), of_floats(metrics)
    if chunked:
        dtype = precision.HALF.get(config.training.precision)
        fuses = config.training.compile and device.type == "cuda"  # on a CPU, compiling does not pay off
        loss = chunked_loss.loss_of(parts[-1], dtype=dtype, mesh=mesh, compiled=fuses)
        metrics = chunked_loss.metrics_of(parts[-1], metrics, dtype=dtype)
    elif config.training.compile and axis_of(mesh, "tensor") is None:  # DTensor's loss is not compiled
        loss = compiling.compile_loss(loss)
    loss = loss if loss_scale is None else loss_scale.apply(loss)
    evaluation = WithMetrics(loss, metrics, terms=terms_of(model, mesh=mesh), model=type(model).__name__)

    build_schedule = partial(
        build_forward_backward, stages=local_stages, replicas=replicas, loss=evaluation, weight=weight,
        groups=groups, options=config.strategy, device=device,
        casts=trains and casts_once(config), finds_unused=trains and is_own(config),
    )  # fmt: skip
    return Assembled(
        parts=parts,
        forward_backward=build_schedule(batch.microbatches),
        build_schedule=build_schedule,
        mesh=mesh,
        forward_flops=flops.total,
        server=replicas.server,
        loss_scale=loss_scale,
        evaluation=evaluation,
        compiled=config.training.compile,
        in_one_graph=config.training.compile_whole,
        traffic=replicas.traffic,
    )


def build_forward_backward(
    microbatches: int,
    *,
    stages: Mapping[int, LayeredModel],
    replicas: Replicas,
    loss: Loss,
    weight: float,
    groups: Groups,
    options: StrategyConfig,
    device: torch.device,
    casts: bool,
    finds_unused: bool,
) -> ForwardBackward:
    """Build the schedule that runs a batch through this rank's `stages`, with all that `surround` adds.

    `casts`: whether a step casts weights; fully_shard casts them itself. `finds_unused`: whether ranks may
    use different weights in a backward pass that is not split.
    """
    mesh = groups.mesh
    if mesh.get_coordinate() is None:
        return Idle(device=device)
    parts = list(stages.values())
    terms = LossTerms(parts[-1], weight=weight, axis=joint(mesh, *BATCH_AXES, *SAMPLE_AXES))
    schedule: ForwardBackward
    if axis_of(mesh, "pipeline") is None:
        schedule = Accumulate(
            replicas.runners[0], model=parts[0], loss=loss, terms=terms, microbatches=microbatches
        )
    else:
        schedule = pipeline.PipelineDriver(
            replicas.runners, stages=stages, loss=loss, terms=terms, groups=groups,
            replicas=replicas.unaveraged, schedule=options.schedule, microbatches=microbatches, device=device,
        )  # fmt: skip
    axis = joint(mesh, *BATCH_AXES, *SAMPLE_AXES) if slicing_axis(mesh) is not None else None
    if finds_unused and axis is not None and not splits_backward(options, mesh=mesh):
        schedule = shard.UnusedWeights(schedule, parts=parts, axis=axis)
    return surround(
        schedule, parts=parts, mesh=mesh, options=options, casts=casts, microbatches=microbatches,
        finds_unused=finds_unused,
    )  # fmt: skip


def splits_backward(options: StrategyConfig, *, mesh: DeviceMesh) -> bool:
    """Whether a pipeline computes the gradients of weights separately, as zero-bubble schedules do."""
    return axis_of(mesh, "pipeline") is not None and schedule_of(options).splits_backward


def surround(
    schedule: ForwardBackward,
    *,
    parts: Sequence[LayeredModel],
    mesh: DeviceMesh,
    options: StrategyConfig,
    casts: bool,
    microbatches: int,
    finds_unused: bool,
) -> ForwardBackward:
    """Wrap `schedule` in the work that ranks with the same samples do before and after it.

    The arguments are those of `build_forward_backward`.
    """
    if casts and slicing_axis(mesh) is None:
        schedule = InContext(schedule, partial(working_weights.cast_weights, parts))
    if layers := float8_scales.scaled_layers(parts):
        axes = slicing_axis(mesh), axis_of(mesh, "tensor")
        schedule = float8_scales.WeightScales(schedule, layers=layers, axes=axes)
    if balances := expert.balances_of(parts):
        axis = joint(mesh, *BATCH_AXES, *SAMPLE_AXES)
        schedule = expert.BalanceExperts(schedule, balances=balances, axis=axis)
    averages = axis_of(mesh, "expert") is not None and slicing_axis(mesh) is None
    if averages and (axis := joint(mesh, "replicate", *SAMPLE_AXES)) is not None:
        schedule = expert.ExpertReplicas(
            schedule, parts=parts, replicas=axis, microbatches=microbatches, finds_unused=finds_unused
        )
    if (axis := axis_of(mesh, "context")) is not None:
        schedule = SequenceParts(schedule, axis=axis)
    if (axis := axis_of(mesh, "tensor")) is not None:
        schedule = TensorGroup(schedule, axis=axis, options=options)
    return schedule


def loss_of(model: LayeredModel, *, mesh: DeviceMesh, options: StrategyConfig) -> tuple[Loss, MetricsOf]:
    """The model's loss and metrics as this rank computes them: of a tile, or of split logits."""
    loss: Loss = model.loss
    metrics: MetricsOf = model.metrics
    if (axis := axis_of(mesh, "tile")) is not None:
        grid = tile_grid(axis.size(), options.tile_grid)
        loss = split_image.loss_of_tile(loss, axis=axis, grid=grid, pixelwise=model.pixelwise)
        metrics = split_image.metrics_of_tile(metrics, axis=axis, grid=grid, pixelwise=model.pixelwise)
    if (axis := axis_of(mesh, "tensor")) is not None and options.loss_parallel:
        loss = split_layers.loss_of_slices(loss, axis=axis)
        metrics = split_layers.metrics_of_slices(metrics, axis=axis)
    return loss, metrics


def terms_of(model: LayeredModel, *, mesh: DeviceMesh) -> TermsOf:
    """The number of the loss's terms as this rank counts it: tiles have equal shares of it."""
    axis = axis_of(mesh, "tile")
    tiles = 1 if axis is None else axis.size()
    return lambda targets: count_terms(model, targets) / tiles


def scale_of(parts: Sequence[LayeredModel], *, config: RunConfig, device: torch.device) -> LossScale | None:
    """The loss scale that float16 needs, for the auxiliary losses of `parts` too."""
    training = config.training
    if training.precision != "float16":
        return None
    scale = LossScale(start=training.loss_scale, grow_every=training.loss_scale_every, device=device)
    for auxiliary in auxiliary_losses(parts):
        auxiliary.loss_scale = scale.factor
    return scale


def cut(
    model: LayeredModel, *, mesh: DeviceMesh, sample_shape: tuple[int, ...], options: StrategyConfig
) -> dict[int, LayeredModel]:
    """This rank's stages by their index in the pipeline; without a pipeline, the whole model."""
    if (axis := axis_of(mesh, "pipeline")) is None:
        return {0: model}
    return stages.cut(model, axis=axis, sample_shape=sample_shape, options=options)


def split(
    part: LayeredModel,
    *,
    mesh: DeviceMesh,
    maps: Maps | None,
    options: StrategyConfig,
    chunked: str | None,
) -> None:
    """Split samples or single layers over devices. `chunked`: the projection that the loss computes."""
    if maps is not None and (axis := axis_of(mesh, "tile")) is not None:
        split_image.apply(part, axis=axis, grid=tile_grid(axis.size(), options.tile_grid), maps=maps)
    if (axis := axis_of(mesh, "expert")) is not None:
        expert.apply(part, axis=axis)
    if (axis := axis_of(mesh, "context")) is not None:
        split_sequence.apply(part, axis=axis, options=options)
    if (axis := axis_of(mesh, "tensor")) is not None:
        split_layers.apply(part, axis=axis, options=options, chunked=chunked)
    if (axis := joint(mesh, *BATCH_AXES, *SAMPLE_AXES)) is not None:
        batch_norm.apply(part, axis=axis)  # over all ranks that share a microbatch


def dropout_part(
    part: LayeredModel, *, mesh: DeviceMesh, options: StrategyConfig
) -> counted_dropout.SamplePart:
    """Which part of each sample this rank has."""
    tiles, axis = None, axis_of(mesh, "tile")
    if axis is not None:
        tiles = split_image.grid_of(axis, tile_grid(axis.size(), options.tile_grid))
    context_axis, tensor_axis = axis_of(mesh, "context"), axis_of(mesh, "tensor")
    return counted_dropout.SamplePart(
        positions=part.sample_positions,
        context=1 if context_axis is None else context_axis.size(),
        tensor=(0, 1) if tensor_axis is None else (tensor_axis.get_local_rank(), tensor_axis.size()),
        tiles=tiles,
    )


def prepare(part: LayeredModel, *, config: RunConfig, mesh: DeviceMesh, device: torch.device) -> None:
    """Apply float8, checkpointing, compilation, and sharding or precision; then materialise the weights."""
    training = config.training
    float8.apply(
        part, recipe=training.fp8, device=device,
        context=axis_of(mesh, "context"), tensor=axis_of(mesh, "tensor"),
        apart=splits_backward(config.strategy, mesh=mesh),
    )  # fmt: skip
    checkpointing.apply(part, keeps=training.activation_checkpointing, compiled=training.compile)
    if training.compile:
        compiling.apply(part, memory_budget=training.memory_budget, whole=training.compile_whole)
    slices = slicing_axis(mesh) is not None
    # fully_shard gathers weights in half precision, so our models need no autocast in bfloat16. float16 lacks
    # the range for norms and the like. The user's own may have float32 buffers, and products need one dtype.
    if not slices or training.precision == "float16" or is_own(config):
        precision.apply(part, precision=training.precision, device_type=device.type)
    if slices:
        split = axis_of(mesh, "expert") is not None
        shard.apply(
            part, mesh=data_mesh(mesh), options=config.strategy, precision=training.precision,
            staged=axis_of(mesh, "pipeline") is not None,
            experts_mesh=data_mesh(mesh, of_experts=True) if split else None,
        )  # fmt: skip
    materialise(
        part, seed=config.seed, device=device, dtype=precision.weights_dtype(training),
        buffers=precision.WEIGHTS[training.precision],
    )  # fmt: skip


@dataclass(frozen=True)
class Replicas:
    """The replicated parts of the model, and how their gradients are averaged."""

    runners: Sequence[Module]  # the parts, in wrappers that average their gradients
    unaveraged: DeviceMesh | None = None  # the axis over which no wrapper averages gradients
    server: ParameterServer | None = None
    traffic: Sequence[dataparallel.DeviceTraffic] | None = None


def replicate_parts(
    parts: list[LayeredModel],
    *,
    config: RunConfig,
    batch: BatchPlan,
    mesh: DeviceMesh,
    device: torch.device,
    trains: bool,
    chunked: bool,
) -> Replicas:
    """Make the ranks that hold the same weights average their gradients.

    `chunked`: whether the loss, outside of the wrappers, multiplies with the head's weight.
    """
    strategy = config.strategy
    if strategy.execution == DATAPARALLEL:
        runner = dataparallel.apply(parts[0], degree=batch.data, device=device)
        return Replicas([runner], traffic=runner.transfers.devices)
    if strategy.execution == PARAMETER_SERVER:
        server = ParameterServer(parts[0].parameters(), options=strategy, finds_unused=is_own(config))
        return Replicas(parts, server=server)
    axis = joint(mesh, *AVERAGED_AXES) if trains and slicing_axis(mesh) is None else None
    if axis is None:
        return Replicas(parts)
    if splits_backward(strategy, mesh=mesh):
        return Replicas(parts, unaveraged=axis)
    finds = is_own(config)  # our models use all their weights
    if finds and chunked and parts[-1].head is not None:
        chunked_loss.show_weight(parts[-1])
    return Replicas(
        [replicate.apply(part, axis=axis, options=strategy, finds_unused=finds) for part in parts]
    )
