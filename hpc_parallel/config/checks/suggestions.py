"""Values that problems of several checks suggest."""

from __future__ import annotations

import math

from hpc_parallel.config.axes import AXES
from hpc_parallel.config.layout import Layout, divisors
from hpc_parallel.config.schema import RunConfig, StrategyConfig


def along_with_less_of(axis: str, strategy: StrategyConfig) -> tuple[str, ...]:
    """Overrides that must accompany a smaller degree of `axis`: none if another axis has degree -1."""
    free = any(getattr(strategy, other) == -1 for other in AXES if other != axis)
    return () if free else ("strategy.replicate=-1",)


def degrees_near(axis: str, config: RunConfig, layout: Layout, *counts: int) -> tuple[int, ...]:
    """The two degrees of `axis` nearest to its own that divide the `counts` and fit the devices."""
    others = {other: getattr(config.strategy, other) for other in AXES if other != axis}
    along = along_with_less_of(axis, config.strategy)
    fixed = [degree for other, degree in others.items() if degree > 1 and (not along or other != "replicate")]
    legal = divisors(math.gcd(*counts, layout.devices // math.prod(fixed)))
    return tuple(sorted(sorted(legal, key=lambda degree: abs(degree - layout.degrees[axis]))[:2]))


def multiples_near(value: int, unit: int) -> tuple[int, ...]:
    """The multiples of `unit` just below and above `value`."""
    below = value // unit * unit
    return (below, below + unit) if below else (unit,)
