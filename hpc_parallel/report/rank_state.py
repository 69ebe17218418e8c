"""What each rank of a run held: `rank_state_bytes` of `summary.json`, which anybody may have written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_parallel.record.values import table
from hpc_parallel.report.figures import number

KEY = "rank_state_bytes"
PARTS = ("parameters", "gradients", "optimizer")
MOST_RANKS = 2**20


@dataclass(frozen=True)
class RankState:
    """Bytes that one rank held."""

    parameters: float
    gradients: float
    optimizer: float  # its state

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer


def rank_states(summary: Mapping[str, Any]) -> Sequence[RankState]:
    """The state of each rank, by rank; empty if it is unknown or not valid."""
    values = summary.get(KEY)
    if not isinstance(values, list) or len(values) > MOST_RANKS:
        return ()
    states = []
    for value in values:
        held = [number(table(value).get(part)) for part in PARTS]
        amounts = [part for part in held if part is not None and part >= 0]
        if len(amounts) < len(PARTS):
            return ()
        states.append(RankState(*amounts))
    return states


def fullest(summary: Mapping[str, Any]) -> float | None:
    """Bytes of the rank that held most; None if they are unknown."""
    return max((state.total for state in rank_states(summary)), default=None)
