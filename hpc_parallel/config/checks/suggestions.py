"""Values that problems of several checks suggest."""

from __future__ import annotations

from hpc_parallel.config.axes import AXES
from hpc_parallel.config.schema import StrategyConfig


def along_with_less_of(axis: str, strategy: StrategyConfig) -> tuple[str, ...]:
    """Overrides that must accompany a smaller degree of `axis`: none if another axis has degree -1."""
    free = any(getattr(strategy, other) == -1 for other in AXES if other != axis)
    return () if free else ("strategy.replicate=-1",)


def multiples_near(value: int, unit: int) -> tuple[int, ...]:
    """The multiples of `unit` just below and above `value`."""
    below = value // unit * unit
    return (below, below + unit) if below else (unit,)
