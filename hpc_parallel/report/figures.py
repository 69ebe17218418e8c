"""Which values of a run folder can be shown and used in calculations; anybody may have written them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpc_parallel.record.summary_file import RankState, Summary
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


def rank_states(summary: Summary) -> Sequence[RankState]:
    """The state of each rank, by rank; empty if it is unknown or not valid."""
    states = tuple(state for state in summary.rank_state_bytes if state is not None and _is_valid(state))
    return states if len(states) == len(summary.rank_state_bytes) else ()


def fullest(summary: Summary) -> float | None:
    """The bytes of the rank with the most state; None if unknown."""
    return max((state.total for state in rank_states(summary)), default=None)


def _is_valid(state: RankState) -> bool:
    amounts = (state.parameters, state.gradients, state.optimizer)
    return all(number(amount) is not None and amount >= 0 for amount in amounts)
