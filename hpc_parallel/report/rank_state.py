"""What each rank of a run held: `rank_state_bytes` of `summary.json`, which anybody may have written."""

from __future__ import annotations

from collections.abc import Sequence

from hpc_parallel.record.summary_file import RankState, Summary
from hpc_parallel.report.figures import number


def rank_states(summary: Summary) -> Sequence[RankState]:
    """The state of each rank, by rank; empty if it is unknown or not valid."""
    states = tuple(state for state in summary.rank_state_bytes if state is not None and _is_valid(state))
    return states if len(states) == len(summary.rank_state_bytes) else ()


def fullest(summary: Summary) -> float | None:
    """Bytes of the rank that held most; None if they are unknown."""
    return max((state.total for state in rank_states(summary)), default=None)


def _is_valid(state: RankState) -> bool:
    amounts = (state.parameters, state.gradients, state.optimizer)
    return all(number(amount) is not None and amount >= 0 for amount in amounts)
