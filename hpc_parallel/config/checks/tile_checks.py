"""Check that the grid of tiles can split the images."""

from __future__ import annotations

import math
from typing import Any

from hpc_parallel.config.checks.image_checks import halvings, is_convnet
from hpc_parallel.config.checks.key_checks import sizes_are_legal
from hpc_parallel.config.checks.suggestions import multiples_near
from hpc_parallel.config.layout import Layout, divisors, tile_grid
from hpc_parallel.config.model_data_schema import ConvNetConfig
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.problems import Problem, Problems


def find_problems(config: RunConfig, layout: Layout) -> Problems:
    """Each tile needs a position on every feature map, and whole pixels for each of its positions."""
    degree, grid = layout.tile, config.strategy.tile_grid
    if grid is not None and (len(grid) != 2 or min(grid) < 1 or math.prod(grid) != degree):
        rule = f"is not a grid [rows,columns] of {degree} tiles"
        legal = [[rows, degree // rows] for rows in divisors(degree)]
        yield Problem("strategy.tile_grid", grid, rule, tuple(legal[:3]))
    elif is_convnet(config.model) and "height" in config.data and sizes_are_legal(config):
        yield from _maps(config.model, config.data, grid=tile_grid(degree, grid))


def _maps(model: dict[str, Any], data: dict[str, Any], *, grid: tuple[int, int]) -> Problems:
    count = halvings(model)
    for side, parts in zip(("height", "width"), grid, strict=True):
        size, unit = data[side], parts * 2**count
        if model["_target_"] != ConvNetConfig._target_ and size % unit:
            rule = f"does not divide by {parts} tiles x 2^{count} for the halvings of {count} blocks"
            yield Problem(f"data.{side}", size, rule, multiples_near(size, unit))
        elif size < unit:
            rule = f"is too small for {parts} tiles and {count} blocks, which each halve it"
            yield Problem(f"data.{side}", size, rule, (unit,))
