"""The order in which each rank of a pipeline runs its actions, for every schedule that the project has.

GPipe: Huang et al. 2019. 1F1B and its interleaved form: Narayanan et al. 2021. The zero-bubble family (Qi et
al. 2024; DeepSeek-AI 2024, DualPipe) is list-scheduled: a rank takes the first action that is ready, the
gradients of inputs before forward passes and those before the gradients of weights.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from hpc_parallel.config.schedules import SCHEDULES, stages_of


class Kind(IntEnum):
    """What an action computes. The values are priorities of the list scheduling, most urgent first."""

    BACKWARD = 0  # the gradients of a stage's inputs, and of its weights unless WEIGHTS follows later
    FORWARD = 1
    WEIGHTS = 2  # the gradients of a stage's weights


FORWARD, BACKWARD, WEIGHTS = Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHTS
Action = tuple[Kind, int, int]  # kind, stage, microbatch
Orders = list[list[Action]]  # the actions of each rank


@dataclass(frozen=True)
class Pipeline:
    """A schedule on `ranks` ranks with `per_rank` stages each."""

    schedule: str
    ranks: int
    microbatches: int
    per_rank: int = 1

    @property
    def stages(self) -> int:
        """The number of stages on all ranks."""
        return self.ranks * self.per_rank

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a rank, first to last."""
        v_shaped = SCHEDULES[self.schedule].v_shaped
        return stages_of(rank, degree=self.ranks, per_rank=self.per_rank, v_shaped=v_shaped)


def orders(pipeline: Pipeline) -> Orders:
    """The actions of each rank, in the order in which it runs them."""
    rules = SCHEDULES[pipeline.schedule]
    if rules.splits_backward:
        return _list_scheduled(pipeline)
    by_schedule = {"1f1b": _one_forward_one_backward, "interleaved": _interleaved}
    order = by_schedule.get(pipeline.schedule, _in_turn if rules.in_turn else _all_forward_first)
    return [order(pipeline, rank) for rank in range(pipeline.ranks)]


def _in_turn(pipeline: Pipeline, rank: int) -> list[Action]:
    stages = pipeline.stages_of(rank)
    return [
        action
        for microbatch in range(pipeline.microbatches)
        for action in (
            *((FORWARD, stage, microbatch) for stage in stages),
            *((BACKWARD, stage, microbatch) for stage in reversed(stages)),
        )
    ]


def _all_forward_first(pipeline: Pipeline, rank: int) -> list[Action]:
    """GPipe; with several stages on a rank, breadth first (Lamy-Poirier 2023)."""
    stages, microbatches = pipeline.stages_of(rank), range(pipeline.microbatches)
    forward = [(FORWARD, stage, microbatch) for stage in stages for microbatch in microbatches]
    return forward + [
        (BACKWARD, stage, microbatch) for stage in reversed(stages) for microbatch in microbatches
    ]


def _one_forward_one_backward(pipeline: Pipeline, rank: int) -> list[Action]:
    count = pipeline.microbatches
    forward = [(FORWARD, rank, microbatch) for microbatch in range(count)]
    backward = [(BACKWARD, rank, microbatch) for microbatch in range(count)]
    return _alternate(forward, backward, warm_up=min(count, pipeline.ranks - 1 - rank))


def _interleaved(pipeline: Pipeline, rank: int) -> list[Action]:
    """Microbatches go in rounds of about one per rank through each of the rank's stages."""
    stages, count = pipeline.stages_of(rank), pipeline.microbatches
    size = count // max(1, count // pipeline.ranks)
    rounds = [range(start, start + size) for start in range(0, count, size)]
    forward = [(FORWARD, stage, m) for one in rounds for stage in stages for m in one]
    backward = [(BACKWARD, stage, m) for one in rounds for stage in reversed(stages) for m in one]
    warm_up = (len(stages) - 1) * size + 2 * (pipeline.ranks - 1 - rank)
    return _alternate(forward, backward, warm_up=min(len(forward), warm_up))


def _alternate(forward: list[Action], backward: list[Action], *, warm_up: int) -> list[Action]:
    """`warm_up` forward passes, then a forward and a backward pass in turn, then the backward passes left."""
    order = forward[:warm_up]
    for ahead, back in zip(forward[warm_up:], backward, strict=False):
        order += [ahead, back]
    return order + backward[len(forward) - warm_up :]


def _list_scheduled(pipeline: Pipeline) -> Orders:
    """Let every rank take the most urgent action that is ready, with all actions equally long."""
    owner = {stage: rank for rank in range(pipeline.ranks) for stage in pipeline.stages_of(rank)}
    ready: list[list[tuple[Kind, int, int]]] = [[] for _ in range(pipeline.ranks)]
    made: Orders = [[] for _ in range(pipeline.ranks)]
    pending = [(FORWARD, 0, microbatch) for microbatch in range(pipeline.microbatches)]
    while pending or any(ready):
        for kind, stage, microbatch in pending:
            depth = stage if kind is BACKWARD else -stage  # finish the microbatches that are furthest on
            heapq.heappush(ready[owner[stage]], (kind, depth, microbatch))
        pending = []
        for rank, queue in enumerate(ready):
            if queue:
                kind, depth, microbatch = heapq.heappop(queue)
                action = (kind, abs(depth), microbatch)
                made[rank].append(action)
                pending += _enabled_by(action, last=pipeline.stages - 1)
    return made


def _enabled_by(action: Action, *, last: int) -> Iterator[Action]:
    kind, stage, microbatch = action
    if kind is FORWARD:
        yield (FORWARD, stage + 1, microbatch) if stage < last else (BACKWARD, stage, microbatch)
    elif kind is BACKWARD:
        yield (WEIGHTS, stage, microbatch)
        if stage > 0:
            yield (BACKWARD, stage - 1, microbatch)
