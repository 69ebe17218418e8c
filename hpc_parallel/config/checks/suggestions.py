"""Suggestions of several checks: the nearest legal numbers, and a layout without an axis."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path

from hpc_parallel.config.schema import RunConfig, StrategyConfig
from hpc_parallel.layout.axes import AXES
from hpc_parallel.layout.layout import Layout, divisors
from hpc_parallel.layout.schedules import SCHEDULES, SUFFIX, schedule_named
from hpc_parallel.problems import Problem, nearest
from hpc_parallel.record.safe_read import list_folder


def near(value: int, legal: Iterable[int]) -> tuple[int, ...]:
    """The two legal numbers that are nearest to `value`, in ascending order."""
    return tuple(sorted(sorted(legal, key=lambda number: abs(number - value))[:2]))


def paths_near(path: Path, *, ending: str = "", folders: bool = False) -> tuple[Path, ...]:
    """The path beside `path` that has the nearest name, of those that end so, or as `path` does.

    folders: whether only folders count.
    """
    ending = "" if folders else ending or path.suffix
    entries = [entry for entry in list_folder(path.parent) if not folders or os.path.isdir(entry)]
    names = [entry.name for entry in entries if entry.name.endswith(ending)]
    return tuple(path.parent / name for name in nearest(path.name, names))


def schedules_near(value: str) -> tuple[str, ...]:
    """The schedule that a name, or the path of a file that does not exist, was probably meant to be."""
    files = paths_near(Path(os.path.expanduser(value)), ending=SUFFIX)
    legal = [str(file) for file in files if schedule_named(str(file)).known]
    return tuple(legal or nearest(Path(value).name, SCHEDULES))


def multiples_near(value: int, unit: int) -> tuple[int, ...]:
    below = value // unit * unit
    return (below, below + unit) if below else (unit,)


def without_axis(axis: str, rule: str, *, config: RunConfig, layout: Layout) -> Problem:
    """The problem of an axis that the run can't use: its degree must be 1."""
    along = along_with_less_of(axis, config.strategy)
    return Problem(f"strategy.{axis}", layout.degrees[axis], rule, (1,), along)


def with_degree_near(axis: str, rule: str, *counts: int, config: RunConfig, layout: Layout) -> Problem:
    """The problem of a degree that must divide the `counts`, and the two nearest that fit the devices."""
    others = {other: getattr(config.strategy, other) for other in AXES if other != axis}
    along, degree = along_with_less_of(axis, config.strategy), layout.degrees[axis]
    fixed = [degree for other, degree in others.items() if degree > 1 and (not along or other != "replicate")]
    legal = divisors(math.gcd(*counts, layout.devices // math.prod(fixed)))
    return Problem(f"strategy.{axis}", degree, rule, near(degree, legal), along)


def along_with_less_of(axis: str, strategy: StrategyConfig) -> tuple[str, ...]:
    """Overrides that must accompany a smaller degree of `axis`: none if another axis has degree -1."""
    free = any(getattr(strategy, other) == -1 for other in AXES if other != axis)
    return () if free else ("strategy.replicate=-1",)
