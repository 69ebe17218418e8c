"""How many microbatches of each of its stages a rank of a pipeline has in memory at most."""

from __future__ import annotations

from collections import Counter

from hpc_parallel.config.schedules import schedule_of, stages_per_rank
from hpc_parallel.config.schema import StrategyConfig


def live_microbatches(
    strategy: StrategyConfig, *, rank: int, ranks: int, microbatches: int
) -> tuple[int, ...]:
    """For each stage of `rank`, in ascending order, the microbatches between forward pass and last gradient.

    It is the moment when there are most in all. torch's schedules decide it; a test counts in their tables.
    """
    if ranks == 1 or schedule_of(strategy).in_turn:
        return (1,) * (1 if ranks == 1 else stages_per_rank(strategy))
    per_rank, name = stages_per_rank(strategy), strategy.schedule
    if name == "1f1b":
        return (min(microbatches, ranks - rank),)
    if schedule_of(strategy).v_shaped:
        first = 2 * ranks - rank - (name == "zbv")  # DualPipe has one more
        return min(microbatches, first), min(microbatches, rank + 1)
    if schedule_of(strategy).rounds:
        last = ranks if schedule_of(strategy).splits_backward else 2 * (ranks - 1 - rank) + 1
        return _in_rounds(last, ranks=ranks, per_rank=per_rank, microbatches=microbatches)
    return (microbatches,) * per_rank  # gpipe, looped_bfs


def _in_rounds(last: int, *, ranks: int, per_rank: int, microbatches: int) -> tuple[int, ...]:
    """Stages take turns of a round of microbatches until a first one is done (Narayanan et al. 2021).

    last: the forward passes after the one that brings the first microbatch to the last stage of this rank.
    """
    in_round = microbatches // max(1, microbatches // ranks)
    passes = min(per_rank * microbatches, (per_rank - 1) * in_round + last)
    turns = Counter(number // in_round % per_rank for number in range(passes))
    return tuple(turns[stage] for stage in range(per_rank))
