"""Which values of a run folder can be shown and used in calculations; anybody may have written them."""

from __future__ import annotations

from typing import Any

from hpc_parallel.record.values import number as finite

MAX_COUNT = 2**31  # of devices, samples of a batch, degrees of an axis, steps
LARGEST, SMALLEST = 1e18, 1e-18  # limits of a figure, so that ratios and sums are finite


def number(value: Any) -> float | None:
    """A figure that can be shown and used in calculations; None for any other value."""
    figure = finite(value)
    return figure if figure is not None and (figure == 0 or SMALLEST <= abs(figure) <= LARGEST) else None


def is_count(value: Any) -> bool:
    """Whether the value is a positive integer of a plausible size."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_COUNT
