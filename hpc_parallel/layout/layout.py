"""Give each axis its degree for a number of devices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from hpc_parallel.layout.axes import AVERAGED_AXES, AXES, BATCH_AXES, with_all_axes

if TYPE_CHECKING:
    from hpc_parallel.config.schema import StrategyConfig

SPMD, DATAPARALLEL, PARAMETER_SERVER = EXECUTIONS = ("spmd", "dataparallel", "parameter_server")


def recorded_strategy(config: Mapping[str, Any]) -> StrategyConfig:
    """The strategy of a recorded `config.yaml`, whose content is plain tables."""
    return cast("StrategyConfig", SimpleNamespace(**with_all_axes(config["strategy"])))


def processes_per_node(strategy: StrategyConfig, *, gpus_per_node: int) -> int:
    """The number of ranks of a node: one for each device, or one that drives all devices."""
    return 1 if strategy.execution == DATAPARALLEL else gpus_per_node


def servers(strategy: StrategyConfig) -> int:
    """The number of ranks that only serve parameters. They are the first ranks and not part of the layout."""
    return int(strategy.execution == PARAMETER_SERVER and strategy.dedicated_server)


@dataclass(frozen=True)
class Layout:
    """The degree of each axis of the device mesh; their product is the number of devices that compute."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    expert: int = 1
    context: int = 1
    tensor: int = 1
    tile: int = 1

    @staticmethod
    def resolve(strategy: StrategyConfig, *, devices: int) -> Layout:
        """The layout of `devices`. A degree of -1 becomes `devices` divided by the other degrees.

        Raises ValueError if more than one degree is -1 or the product is not `devices`.
        """
        return _resolve(tuple(int(getattr(strategy, axis)) for axis in AXES), devices)

    @cached_property
    def degrees(self) -> dict[str, int]:
        """The degree of each axis by its name, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def devices(self) -> int:
        """The number of devices that compute."""
        return math.prod(self.degrees.values())

    @cached_property
    def data(self) -> int:
        """The number of parts of the global batch."""
        return math.prod(self.degrees[axis] for axis in BATCH_AXES)

    @cached_property
    def averaged(self) -> int:
        """The number of ranks that hold the same weights and average their gradients."""
        return math.prod(self.degrees[axis] for axis in AVERAGED_AXES)

    @cached_property
    def by_fully_shard(self) -> bool:
        """Whether fully_shard holds the weights.

        It does if they are sliced. It also does if layers are split and gradients averaged, because
        DistributedDataParallel does not average gradients of distributed tensors.
        """
        return self.shard > 1 or (self.averaged > 1 and self.tensor > 1)

    @property
    def expert_slices(self) -> int:
        """The number of devices over which fully_shard slices the experts that `expert` gives to one."""
        return self.shard * self.context * self.tile if self.by_fully_shard else 1

    def uneven_slices(self, dim: int) -> str | None:
        """The broken rule if the slices of the experts' weights don't divide the model's width, `dim`."""
        slices = self.expert_slices
        rule = f"makes {slices} slices of each expert's weights, which don't divide their width, {dim}"
        return rule if dim % slices else None

    def coordinates(self, rank: int) -> dict[str, int]:
        """The position of a rank on each axis; neighbouring ranks are neighbours on the innermost axis."""
        positions: dict[str, int] = {}
        for axis, degree in reversed(self.degrees.items()):
            rank, positions[axis] = divmod(rank, degree)
        return positions

    def replica(self, rank: int) -> int:
        """The part of the global batch that a rank works on."""
        positions, part = self.coordinates(rank), 0
        for axis in BATCH_AXES:
            part = part * self.degrees[axis] + positions[axis]
        return part

    def __str__(self) -> str:
        used = [f"{axis} {degree}" for axis, degree in self.degrees.items() if degree > 1]
        return " x ".join(used) or "one device"


@lru_cache(maxsize=1024)  # the checks and the plan of a run ask for the same layout
def _resolve(asked: tuple[int, ...], devices: int) -> Layout:
    degrees = dict(zip(AXES, asked, strict=True))
    free = [axis for axis, degree in degrees.items() if degree == -1]
    if len(free) > 1:
        raise ValueError(f"{' and '.join(free)} are both -1")
    fixed = math.prod(degree for degree in asked if degree != -1)
    if free and devices % fixed == 0:
        degrees[free[0]] = devices // fixed
    layout = Layout(**degrees)
    if layout.devices != devices:
        raise ValueError(f"the degrees don't multiply to {devices}")
    return layout


def layout_of(strategy: StrategyConfig, *, devices: int) -> Layout:
    """The layout of the devices that compute. Raises ValueError as `Layout.resolve` does."""
    return Layout.resolve(strategy, devices=devices - servers(strategy))


def legal_layout(strategy: StrategyConfig, *, devices: int) -> Layout | None:
    """The layout of a strategy; None where the degrees are wrong, which `checks/layout_checks.py` reports."""
    try:
        return layout_of(strategy, devices=devices)
    except (ValueError, ZeroDivisionError):
        return None


def share_of(rank: int, *, layout: Layout, strategy: StrategyConfig) -> tuple[int | None, int]:
    """The part of the global batch that a rank takes (None if it takes none), and the number of parts."""
    if strategy.execution == DATAPARALLEL:
        return 0, 1  # the process splits the batch over its devices
    position = rank - servers(strategy)
    return (None if position < 0 else layout.replica(position)), layout.data


def tile_grid(tiles: int, chosen: Sequence[int] | None = None) -> tuple[int, int]:
    """Rows and columns of the tiles: `chosen`, or the grid nearest to a square that has rows <= columns."""
    if chosen is not None:
        rows, columns = chosen
        return rows, columns
    rows = max(rows for rows in divisors(tiles) if rows * rows <= tiles)
    return rows, tiles // rows


def divisors(number: int) -> list[int]:
    """All divisors, in ascending order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]
