"""Simulate a pipeline action by action: when each rank computes, and when it waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hpc_parallel.planning.pipeline_orders import BACKWARD, FORWARD, Action, ActionKind, Pipeline, orders


def _free(source: int, target: int) -> float:
    return 0.0


@dataclass(frozen=True)
class Span:
    """One action on its rank, from `start_s` to `end_s` after the start of the step."""

    rank: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class PlannedTimeline:
    """The time of all actions of a step, and the time in which each rank computes."""

    total_s: float
    busy_s: tuple[float, ...]

    @property
    def bubble_share(self) -> float:
        """The share of all ranks' time in which they don't compute."""
        return 1 - sum(self.busy_s) / (len(self.busy_s) * self.total_s)


def simulate(
    pipeline: Pipeline,
    *,
    action_s: Callable[[ActionKind, int], float],
    transfer_s: Callable[[int, int], float] = _free,
    at_once: float | None = None,
    spans: list[Span] | None = None,
) -> PlannedTimeline:
    """Run each rank's actions in the order of its schedule, as soon as their inputs have arrived.

    action_s: seconds of an action of a kind on a stage. transfer_s: seconds from one stage to a neighbouring
    stage on another rank; transfers and computation run at the same time, and a link takes several transfers
    at once. at_once: how many ranks compute at full speed at the same time, if they share cores; None: all.
    spans: a list to which every action is added.

    Raises ValueError if ranks wait for each other.
    """
    inputs = _Inputs(pipeline, transfer_s)
    costs = {(kind, stage): action_s(kind, stage) for kind in ActionKind for stage in range(pipeline.stages)}
    if at_once is not None and at_once < pipeline.ranks:
        return _Sharing(pipeline, inputs, costs, at_once, [] if spans is None else spans).run()
    left = [iter(order) for order in orders(pipeline)]
    upcoming = [next(order, None) for order in left]
    free_s, busy_s = [0.0] * pipeline.ranks, [0.0] * pipeline.ranks
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(left):
            while (action := upcoming[rank]) is not None and (ready_s := inputs.ready_s(action)) is not None:
                cost = costs[action[:2]]
                free_s[rank] = inputs.ends[action] = max(free_s[rank], ready_s) + cost
                busy_s[rank] += cost
                if spans is not None:
                    spans.append(Span(rank, action, free_s[rank] - cost, free_s[rank]))
                upcoming[rank] = next(order, None)
                moved = True
    if any(action is not None for action in upcoming):
        raise ValueError(f"the ranks of {pipeline} wait for each other")
    return PlannedTimeline(max(free_s), tuple(busy_s))


class _Sharing:
    """Ranks that share cores: actions that run at the same time slow each other down.

    Time advances to the next event: an action ends, or the input of a rank that waits arrives.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        inputs: _Inputs,
        costs: Mapping[tuple[ActionKind, int], float],
        at_once: float,
        spans: list[Span],
    ) -> None:
        self._pipeline, self._inputs, self._costs, self._at_once = pipeline, inputs, costs, at_once
        self._spans = spans
        self._left = [deque(order) for order in orders(pipeline)]
        self._running: dict[int, float] = {}  # rank -> seconds that its action needs on a core of its own
        self._starts_s: dict[int, float] = {}  # rank -> when its running action started
        self._busy_s = [0.0] * pipeline.ranks
        self._now_s = 0.0

    def run(self) -> PlannedTimeline:
        while any(self._left):
            arrivals_s = self._start_ready()
            if not self._running:
                if not arrivals_s:
                    raise ValueError(f"the ranks of {self._pipeline} wait for each other")
                self._now_s = min(arrivals_s)
                continue
            self._advance(arrivals_s)
        return PlannedTimeline(self._now_s, tuple(self._busy_s))

    def _start_ready(self) -> list[float]:
        """Start the next actions whose inputs have arrived; returns the arrival times of other inputs."""
        arrivals_s = []
        for rank, order in enumerate(self._left):
            if rank in self._running or not order:
                continue
            ready_s = self._inputs.ready_s(order[0])
            if ready_s is not None and ready_s <= self._now_s:
                self._running[rank], self._starts_s[rank] = self._costs[order[0][:2]], self._now_s
            elif ready_s is not None:
                arrivals_s.append(ready_s)
        return arrivals_s

    def _advance(self, arrivals_s: Sequence[float]) -> None:
        speed = min(1.0, self._at_once / len(self._running))
        first = min(self._running, key=lambda rank: self._running[rank])
        end_s = self._now_s + self._running[first] / speed
        next_s = min(end_s, *arrivals_s) if arrivals_s else end_s
        elapsed_s = next_s - self._now_s
        self._now_s = next_s
        for rank in self._running:
            self._running[rank] -= elapsed_s * speed
            self._busy_s[rank] += elapsed_s
        if next_s == end_s:
            action = self._left[first].popleft()
            self._inputs.ends[action] = end_s
            self._spans.append(Span(first, action, self._starts_s[first], end_s))
            del self._running[first]


class _Inputs:
    """The end times of the actions so far, and when the inputs of other actions are ready."""

    def __init__(self, pipeline: Pipeline, transfer_s: Callable[[int, int], float]) -> None:
        self.ends: dict[Action, float] = {}
        self._last = pipeline.stages - 1
        owner = {stage: rank for rank in range(pipeline.ranks) for stage in pipeline.stages_of(rank)}
        self._links = {
            (source, target): transfer_s(source, target) if owner[source] != owner[target] else 0.0
            for source in owner
            for target in (source - 1, source + 1)
            if target in owner
        }

    def ready_s(self, action: Action) -> float | None:
        """When the action's input is on its rank; None if the action that makes this input has not run."""
        kind, stage, microbatch = action
        if kind is FORWARD and stage == 0:
            return 0.0
        if kind is FORWARD or (kind is BACKWARD and stage < self._last):
            source = stage - 1 if kind is FORWARD else stage + 1
            end = self.ends.get((kind, source, microbatch))
            return None if end is None else end + self._links[source, stage]
        before = FORWARD if kind is BACKWARD else BACKWARD
        return self.ends.get((before, stage, microbatch))
