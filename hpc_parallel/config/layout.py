"""Every axis a number: a strategy's degrees resolved against the devices, and the batch against both."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol, cast

AXES = ("pipeline", "replicate", "shard", "context", "tensor", "tile")  # outermost first
SPMD, DATAPARALLEL, PARAMETER_SERVER = EXECUTIONS = ("spmd", "dataparallel", "parameter_server")


class Degrees(Protocol):
    """What a strategy says of each axis; -1 stands for what the others leave."""

    pipeline: int
    replicate: int
    shard: int
    context: int
    tensor: int
    tile: int


class Execution(Protocol):
    """What a strategy says of its processes."""

    execution: str
    dedicated_server: bool


class Strategy(Degrees, Execution, Protocol):
    name: str


def recorded_strategy(config: Mapping[str, Any]) -> Strategy:
    """The strategy of a recorded `config.yaml`, whose content is plain tables."""
    return cast(Strategy, SimpleNamespace(**config["strategy"]))


def processes_per_node(strategy: Execution, *, gpus_per_node: int) -> int:
    """How many ranks a node starts: one a device, or one that drives all of them."""
    return 1 if strategy.execution == DATAPARALLEL else gpus_per_node


def servers(strategy: Execution) -> int:
    """How many ranks, the first ones, stand outside of the layout: they serve and do nothing else."""
    return int(strategy.execution == PARAMETER_SERVER and strategy.dedicated_server)


@dataclass(frozen=True)
class Layout:
    """The degree of each axis of the device mesh; their product is the number of devices that compute."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    tile: int = 1

    @classmethod
    def resolve(cls, strategy: Degrees, *, devices: int) -> Layout:
        """Give the axis marked -1 what the others leave of `devices`.

        Raises ValueError where more than one is -1 or the product is not `devices`.
        """
        degrees = {axis: int(getattr(strategy, axis)) for axis in AXES}
        free = [axis for axis, degree in degrees.items() if degree == -1]
        if len(free) > 1:
            raise ValueError(f"{' and '.join(free)} are both -1")
        fixed = math.prod(degree for degree in degrees.values() if degree != -1)
        if free and devices % fixed == 0:
            degrees[free[0]] = devices // fixed
        layout = cls(**degrees)
        if layout.devices != devices:
            raise ValueError(f"the degrees don't multiply to {devices}")
        return layout

    @property
    def degrees(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def devices(self) -> int:
        return math.prod(self.degrees.values())

    @property
    def data(self) -> int:
        """How many parts the global batch is split into."""
        return self.replicate * self.shard

    @property
    def by_fully_shard(self) -> bool:
        """Whether fully_shard has the weights: sliced ones, and split layers whose gradients are averaged
        (of distributed tensors it does that, DistributedDataParallel does not)."""
        return self.shard > 1 or (self.replicate * self.context > 1 and self.tensor > 1)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank stands on each axis; neighbours in rank are neighbours on the innermost axis."""
        places: dict[str, int] = {}
        for axis, degree in reversed(self.degrees.items()):
            rank, places[axis] = divmod(rank, degree)
        return places

    def replica(self, rank: int) -> int:
        """Which part of the global batch a rank works on."""
        places = self.coordinates(rank)
        return places["replicate"] * self.shard + places["shard"]

    def __str__(self) -> str:
        used = [f"{axis} {degree}" for axis, degree in self.degrees.items() if degree > 1]
        return " x ".join(used) or "one device"


def layout_of(strategy: Strategy, *, devices: int) -> Layout:
    """The layout of those of `devices` that compute. Raises ValueError as `Layout.resolve` does."""
    return Layout.resolve(strategy, devices=devices - servers(strategy))


@dataclass(frozen=True)
class BatchPlan:
    """How the global batch reaches the devices: `data` parts of `microbatches` of `microbatch_size`."""

    data: int
    microbatches: int
    microbatch_size: int

    @property
    def samples_per_replica(self) -> int:
        return self.microbatches * self.microbatch_size


def share_of(rank: int, *, layout: Layout, strategy: Execution) -> tuple[int | None, int]:
    """Which part of the global batch a rank takes (None: none), and into how many it is parted."""
    if strategy.execution == DATAPARALLEL:
        return 0, 1  # the one process hands its devices their parts
    place = rank - servers(strategy)
    return (None if place < 0 else layout.replica(place)), layout.data


def plan_batch(
    global_batch_size: int,
    *,
    layout: Layout,
    microbatch_size: int | None,
    microbatches: int | None,
    in_turn: bool = False,
) -> BatchPlan:
    """Split the global batch without remainder.

    Where neither is given: one microbatch, or in a pipeline up to four a stage, since the idle share
    of a pipeline of P stages and M microbatches is (P-1)/(M+P-1) (Huang et al. 2019, GPipe); but one
    where they run `in_turn` through the stages, whose idle share (P-1)/P no number changes.

    Raises ValueError where the split leaves a remainder or the two contradict each other.
    """
    samples, remainder = divmod(global_batch_size, layout.data)
    if remainder:
        raise ValueError(f"{global_batch_size} samples over {layout.data} replicas")
    if microbatches is None:
        if microbatch_size is not None:
            microbatches = max(1, samples // microbatch_size)
        elif layout.pipeline > 1 and not in_turn:
            most = min(samples, 4 * layout.pipeline)
            microbatches = max(count for count in divisors(samples) if count <= most)
        else:
            microbatches = 1
    size = microbatch_size or max(1, samples // microbatches)
    if microbatches * size != samples:
        raise ValueError(f"{samples} samples in {microbatches} microbatches of {size}")
    return BatchPlan(data=layout.data, microbatches=microbatches, microbatch_size=size)


def tile_grid(tiles: int, chosen: Sequence[int] | None = None) -> tuple[int, int]:
    """Rows and columns of the tiles of an image: those chosen, or the most square with no more rows."""
    if chosen is not None:
        rows, columns = chosen
        return rows, columns
    rows = max(rows for rows in divisors(tiles) if rows * rows <= tiles)
    return rows, tiles // rows


def divisors(number: int) -> list[int]:
    """All of them, rising."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]
