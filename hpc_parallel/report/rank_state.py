"""The bytes of state on each rank, from `rank_state_bytes` of `summary.json`.

Anybody may have written this file, so its values are checked.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpc_parallel.record.summary_file import RankState, Summary
from hpc_parallel.report.figures import number


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
