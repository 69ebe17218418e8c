"""The blocks of each pipeline stage: from explicit cuts, or balanced over contiguous stages."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from math import inf
from typing import TYPE_CHECKING

from hpc_parallel.layout.schedules import schedule_of, stages_of, stages_per_rank
from hpc_parallel.layout.shares import stage_shares
from hpc_parallel.problems import ConfigError, Problem

if TYPE_CHECKING:
    from hpc_parallel.config.schema import StrategyConfig


@dataclass(frozen=True)
class PartCosts:
    """The cost of each part of a model, all in the same unit."""

    stem: int
    blocks: tuple[int, ...]
    head: int

    @property
    def total(self) -> int:
        return self.stem + sum(self.blocks) + self.head


class PartFlops(PartCosts):
    """FLOPs of one sample's forward pass by part; a multiplication and an addition count as two."""


def divide_blocks(
    costs: PartCosts, *, stages: int, options: StrategyConfig, between: Container[int] | None = None
) -> list[range]:
    """The blocks of each stage, in order, by `strategy.cuts`, or by `costs` and `strategy.shares`.

    `between`: the blocks before which a stage may begin, as for `balance`; explicit cuts are checked too.
    Raises ConfigError if the model has too few blocks.
    """
    count = len(costs.blocks)
    if options.cuts is not None:
        if problem := cuts_problem(options.cuts, stages=stages, blocks=count):
            raise ConfigError([problem])
        return [range(start, end) for start, end in pairwise((0, *options.cuts, count))]
    return balance(costs, stages=stages, speeds=stage_speeds(options, stages=stages), between=between)


def cuts_problem(cuts: Sequence[int], *, stages: int, blocks: int | None) -> Problem | None:
    """The problem of `strategy.cuts` for these stages; blocks: the model's number, None if unknown."""
    end = blocks if blocks is not None else max([stages, *(cut + 1 for cut in cuts)])
    rising = all(before < after for before, after in pairwise((0, *cuts, end)))
    if rising and len(cuts) == stages - 1:
        return None
    even = [end * stage // stages for stage in range(1, stages)]
    upto = "on" if blocks is None else f"to {end - 1}, below {blocks} blocks"
    rule = f"must be the {stages - 1} first blocks of the later stages: rising numbers from 1 {upto}"
    return Problem("strategy.cuts", list(cuts), rule, (even, None))


def stage_speeds(options: StrategyConfig, *, stages: int) -> list[float]:
    """The speed of the rank that has each stage, by `strategy.shares`."""
    per_rank = stages_per_rank(options)
    degree, v_shaped = stages // per_rank, schedule_of(options).v_shaped
    speeds = [1.0] * stages
    for rank, share in enumerate(stage_shares(options.shares, degree=degree)):
        for stage in stages_of(rank, degree=degree, per_rank=per_rank, v_shaped=v_shaped):
            speeds[stage] = share
    return speeds


def balance(
    costs: PartCosts,
    *,
    stages: int,
    speeds: Sequence[float] | None = None,
    between: Container[int] | None = None,
) -> list[range]:
    """The blocks of each stage, in order, such that the longest time of a stage is minimal.

    The time is the cost divided by the stage's speed; all `speeds` are equal if not given. The stem counts in
    the first stage, the head in the last. `between`: the blocks that may begin a stage, enough for all
    stages; by default every block.

    Raises ConfigError if there are more stages than blocks.
    """
    count = len(costs.blocks)
    if stages > count:
        rule = f"stages are more than the model's {count} blocks: each stage needs at least one"
        raise ConfigError([Problem("strategy.pipeline", stages, rule, (count,))])
    speeds = tuple(speeds or [1.0] * stages)
    begins = frozenset(block for block in range(1, count) if between is None or block in between)
    return [range(start, end) for start, end in pairwise((0, *_ends(costs, speeds, begins)))]


@lru_cache(maxsize=64)  # a search for a layout asks for the same cuts again and again
def _ends(costs: PartCosts, speeds: tuple[float, ...], begins: frozenset[int]) -> tuple[int, ...]:
    """The end of each stage; `begins`: the blocks that may begin one."""
    count, stages = len(costs.blocks), len(speeds)
    before = [0.0, *accumulate(costs.blocks)]

    def time(start: int, end: int, *, stage: int) -> float:
        ends = costs.stem * (start == 0) + costs.head * (end == count)
        return (before[end] - before[start] + ends) / speeds[stage]

    @cache
    def best(start: int, remaining: int) -> tuple[float, tuple[int, ...]]:
        """The minimal longest time of the last `remaining` stages, which begin at `start`, and their ends."""
        stage = stages - remaining
        if remaining == 1:
            return time(start, count, stage=stage), (count,)
        options = []
        for end in range(start + 1, count - remaining + 2):
            if end < count and end not in begins:
                continue
            longest, cuts = best(end, remaining - 1)
            options.append((max(time(start, end, stage=stage), longest), (end, *cuts)))
        return min(options, default=(inf, ()))

    return best(0, stages)[1]
