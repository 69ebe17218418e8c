"""The order in which each rank of a pipeline runs its actions, how many microbatches it holds, and when.

GPipe: Huang et al. 2019. 1F1B and its interleaved form: Narayanan et al. 2021. The zero-bubble family (Qi et
al. 2024; DeepSeek-AI 2024, DualPipe) is list-scheduled: a rank takes the first action that is ready, the
gradients of inputs first, then forward passes, then the gradients of weights.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from hpc_parallel.config.schema import StrategyConfig
from hpc_parallel.layout import action_file
from hpc_parallel.layout.schedules import schedule_named, schedule_of, stages_of, stages_per_rank


class ActionKind(IntEnum):
    """What an action computes. The values are priorities of the list scheduling, most urgent first."""

    BACKWARD = 0  # the gradients of a stage's inputs, and of its weights unless WEIGHTS follows later
    FORWARD = 1
    WEIGHTS = 2  # the gradients of a stage's weights


FORWARD, BACKWARD, WEIGHTS = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.WEIGHTS
Action = tuple[ActionKind, int, int]  # kind, stage, microbatch
Orders = list[list[Action]]  # the actions of each rank
Counts = tuple[int, ...]  # microbatches in each stage of a rank


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
        v_shaped = schedule_named(self.schedule).v_shaped
        return stages_of(rank, degree=self.ranks, per_rank=self.per_rank, v_shaped=v_shaped)


def orders(pipeline: Pipeline) -> Orders:
    """The actions of each rank, in the order in which it runs them."""
    rules = schedule_named(pipeline.schedule)
    if rules.file is not None:
        return [[*_of_file(actions, rules.splits_backward)] for actions in rules.file.ranks]
    if rules.splits_backward:
        return _list_scheduled(pipeline)
    order = {
        "naive": _in_turn, "gpipe": _all_forward_first, "looped_bfs": _all_forward_first,
        "1f1b": _one_forward_one_backward, "interleaved": _interleaved,
    }[pipeline.schedule]  # fmt: skip
    return [order(pipeline, rank) for rank in range(pipeline.ranks)]


def _of_file(actions: Sequence[action_file.Action], splits_backward: bool) -> Iterator[Action]:
    """In a schedule that splits backward passes, a whole one is its two halves in turn."""
    kinds: dict[str, tuple[ActionKind, ...]] = {"F": (FORWARD,), "I": (BACKWARD,), "W": (WEIGHTS,)}
    kinds["B"] = (BACKWARD, WEIGHTS) if splits_backward else (BACKWARD,)
    for stage, kind, microbatch in actions:
        yield from ((one, stage, microbatch) for one in kinds[kind])


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
    """Each round of about one microbatch per rank goes through all stages of the rank."""
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
    ready: list[list[tuple[ActionKind, int, int]]] = [[] for _ in range(pipeline.ranks)]
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


def fullest_moments(
    strategy: StrategyConfig, *, rank: int, ranks: int, microbatches: int
) -> Sequence[tuple[Counts, Counts]]:
    """The moments at which `rank` may be fullest: the live microbatches of its stages, and those that wait.

    A microbatch is live between its forward pass and its last gradient, and waits between the halves of a
    split backward pass. Stages are in ascending order. A test counts both numbers in torch's tables.
    """
    per_rank, rules = stages_per_rank(strategy), schedule_of(strategy)
    if ranks == 1:
        return [((1,), ())]
    if rules.file is not None:
        return list(_moments(rules.file.ranks[rank], rules.file.stages_of[rank]))
    if rules.v_shaped:
        return _of_v(strategy.schedule, rank=rank, ranks=ranks, microbatches=microbatches)
    live = (microbatches,) * per_rank  # gpipe, looped_bfs
    if rules.in_turn:
        live = (1,) * per_rank
    elif strategy.schedule == "1f1b":
        live = (min(microbatches, ranks - rank),)
    elif rules.rounds:
        last = ranks if rules.splits_backward else 2 * (ranks - 1 - rank) + 1
        live = _in_rounds(last, ranks=ranks, per_rank=per_rank, microbatches=microbatches)
    if not rules.splits_backward:
        return [(live, ())]
    # The first stage of rank 0 has nothing to send back, and waits for nothing.
    waiting = (rank + 1, *(0,) * (len(live) - 1)) if rank else (*(0,) * (len(live) - 1), 1)
    return [(live, tuple(map(min, waiting, live)))]


def _of_v(schedule: str, *, rank: int, ranks: int, microbatches: int) -> Sequence[tuple[Counts, Counts]]:
    """The moments of a rank with one stage from the start and one from the end.

    In the last moment, all live microbatches of the second stage wait.
    """
    second, later = min(microbatches, rank + 1), max(0, microbatches - ranks)
    if schedule == "zbv":
        waiting = min(rank, later)
        return [
            ((min(microbatches, 2 * ranks - rank - 1), second), (0, 1)),
            ((min(ranks, later + 1), waiting), (waiting + 1, waiting)),
        ]
    first, waiting = min(microbatches, 2 * ranks - rank), (rank + 1) // 2
    return [
        ((first, second), (0, 0)),
        ((first - 1, second), (0, 1)),
        ((min(ranks - waiting, later + 1), waiting), (rank + 1 - waiting, waiting)),
    ]


def _moments(actions: Sequence[action_file.Action], stages: Sequence[int]) -> Iterator[tuple[Counts, Counts]]:
    """The numbers of a file, after each of its actions."""
    live, waiting = Counter[int](), Counter[int]()
    for stage, kind, _ in actions:
        live[stage] += {"F": 1, "I": 0}.get(kind, -1)
        waiting[stage] += {"I": 1, "W": -1}.get(kind, 0)
        yield tuple(live[stage] for stage in stages), tuple(waiting[stage] for stage in stages)


def _in_rounds(last: int, *, ranks: int, per_rank: int, microbatches: int) -> tuple[int, ...]:
    """Each stage takes a round of microbatches in turn until one is done (Narayanan et al. 2021).

    last: the number of forward passes after the first microbatch has reached the last stage of this rank.
    """
    in_round = microbatches // max(1, microbatches // ranks)
    passes = min(per_rank * microbatches, (per_rank - 1) * in_round + last)
    turns = Counter(number // in_round % per_rank for number in range(passes))
    return tuple(turns[stage] for stage in range(per_rank))


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
    transfer_s: Callable[[int, int], float] = lambda source, target: 0.0,
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


@dataclass
class _Sharing:
    """Ranks that share cores: actions that run at the same time slow each other down.

    Time advances to the next event: an action ends, or the input of a rank that waits arrives.
    """

    pipeline: Pipeline
    inputs: _Inputs
    costs: Mapping[tuple[ActionKind, int], float]
    at_once: float
    spans: list[Span]

    def __post_init__(self) -> None:
        self._left = [deque(order) for order in orders(self.pipeline)]
        self._running: dict[int, float] = {}  # rank -> seconds that its action needs on a core of its own
        self._starts_s: dict[int, float] = {}  # rank -> when its running action started
        self._busy_s = [0.0] * self.pipeline.ranks
        self._now_s = 0.0

    def run(self) -> PlannedTimeline:
        while any(self._left):
            arrivals_s = self._start_ready()
            if not self._running:
                if not arrivals_s:
                    raise ValueError(f"the ranks of {self.pipeline} wait for each other")
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
            ready_s = self.inputs.ready_s(order[0])
            if ready_s is not None and ready_s <= self._now_s:
                self._running[rank], self._starts_s[rank] = self.costs[order[0][:2]], self._now_s
            elif ready_s is not None:
                arrivals_s.append(ready_s)
        return arrivals_s

    def _advance(self, arrivals_s: Sequence[float]) -> None:
        speed = min(1.0, self.at_once / len(self._running))
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
            self.inputs.ends[action] = end_s
            self.spans.append(Span(first, action, self._starts_s[first], end_s))
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
