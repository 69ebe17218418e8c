"""From a configuration to a model on this rank: the techniques, applied top to bottom in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from hydra.utils import instantiate
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter

from hpc_parallel.config.layout import DATAPARALLEL, PARAMETER_SERVER, BatchPlan, tile_grid
from hpc_parallel.config.schedules import schedule_of
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.models.layered import LayeredModel, materialise
from hpc_parallel.strategies import (
    batch_norm,
    checkpointing,
    compiling,
    context,
    dataparallel,
    pipeline,
    precision,
    replicate,
    shard,
    stages,
    tensor,
    tile,
)  # fmt: skip
from hpc_parallel.strategies.accumulate import Accumulate
from hpc_parallel.strategies.device_traffic import DeviceTraffic
from hpc_parallel.strategies.forward_backward import ForwardBackward
from hpc_parallel.strategies.mesh import axis_of, data_mesh, joint, slicing_axis
from hpc_parallel.strategies.parameter_server import Idle, ParameterServer


@dataclass(frozen=True)
class Assembled:
    """What this rank holds of the model, and how a batch goes through all of it."""

    parts: Sequence[LayeredModel]
    forward_backward: ForwardBackward
    through: Callable[[int], ForwardBackward]  # another way, for batches of so many microbatches of any size
    mesh: DeviceMesh
    forward_flops: float  # of the whole model, a sample
    server: ParameterServer | None = None  # where it alone has the optimizer
    traffic: Sequence[DeviceTraffic] | None = None  # of the devices of one process, where it drives several

    def named_parameters(self) -> dict[str, Parameter]:
        """Full names; a tied weight that another rank holds too goes by its canonical name.

        Of two copies on this rank it is the original, which the other follows.
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
    config: RunConfig,
    *,
    batch: BatchPlan,
    sample_shape: tuple[int, ...],
    mesh: DeviceMesh,
    device: torch.device,
    trains: bool = True,
) -> Assembled:
    """Build on meta, cut, split samples or layers, checkpoint, compile, shard, set the precision,
    materialise, replicate.

    Weights are materialised before replication, which wants real ones, and after everything that
    decides which of them this rank needs. Each is drawn from (seed, its name), so no rank tells
    another its weights. What only runs forward (not `trains`) needs no replication: it averages gradients.
    """
    strategy = config.strategy
    with torch.device("meta"):
        parts: list[LayeredModel] = [instantiate(config.model)]
    flops = parts[0].forward_flops(sample_shape)
    tiles = axis_of(mesh, "tile")
    if tiles is not None:
        grid = tile_grid(tiles.size(), strategy.tile_grid)
        maps = tile.measure(parts[0], sample_shape=sample_shape, grid=grid)
    sequence = axis_of(mesh, "context")
    if sequence is not None:
        context.require(parts[0], axis=sequence, sample_shape=sample_shape)
    schedule = schedule_of(strategy)
    pipe = axis_of(mesh, "pipeline")
    if pipe is not None:
        here = stages.cut(parts[0], axis=pipe, sample_shape=sample_shape, options=strategy)
        indices, parts = list(here), list(here.values())
    training = config.training
    exactness = training.precision
    together = axis_of(mesh, "tensor")
    one_batch = joint(mesh, "replicate", "shard", "context", "tile")  # the ranks that share a microbatch
    sharded = slicing_axis(mesh) is not None
    for part in parts:
        if tiles is not None:
            tile.apply(part, axis=tiles, grid=grid, maps=maps)
        if sequence is not None:
            context.apply(part, axis=sequence, options=strategy)
        if together is not None:
            tensor.apply(part, axis=together, options=strategy)
        if one_batch is not None:
            batch_norm.apply(part, axis=one_batch)
        checkpointing.apply(part, keeps=training.activation_checkpointing, compiled=training.compile)
        if training.compile:
            compiling.apply(part)
        if sharded:
            shard.apply(part, mesh=data_mesh(mesh), options=strategy, precision=exactness)
        else:
            precision.apply(part, precision=exactness, device_type=device.type)
        materialise(part, seed=config.seed, device=device, dtype=precision.WEIGHTS[exactness])
    runners: list[torch.nn.Module] = list(parts)
    averaged = joint(mesh, "replicate", "context", "tile") if trains and not sharded else None
    server: ParameterServer | None = None
    traffic: Sequence[DeviceTraffic] | None = None
    if strategy.execution == DATAPARALLEL:
        runner = dataparallel.apply(parts[0], degree=batch.data, device=device)
        runners, traffic = [runner], runner.funnel.devices
    elif strategy.execution == PARAMETER_SERVER:
        server = ParameterServer(parts[0].parameters(), options=strategy, device=device)
    elif averaged is not None and not (pipe is not None and schedule.splits_backward):
        runners = [replicate.apply(part, axis=averaged, options=strategy) for part in parts]
        averaged = None

    def through(microbatches: int) -> ForwardBackward:
        way: ForwardBackward
        if mesh.get_coordinate() is None:
            return Idle(device=device)
        if pipe is None:
            way = Accumulate(runners[0], model=parts[0], microbatches=microbatches)
        else:
            way = pipeline.Pipeline(
                runners, stages=parts, indices=indices, mesh=mesh, replicas=averaged,
                schedule=strategy.schedule, microbatches=microbatches, device=device,
            )  # fmt: skip
        if sequence is not None:
            way = context.OneSequence(way, axis=sequence)
        if together is not None:
            way = tensor.OneReplica(way, axis=together, options=strategy)
        return way

    return Assembled(
        parts=parts,
        forward_backward=through(batch.microbatches),
        through=through,
        mesh=mesh,
        forward_flops=flops.total,
        server=server,
        traffic=traffic,
    )
