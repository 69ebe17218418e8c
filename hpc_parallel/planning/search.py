"""Search the layouts of a number of devices for the fastest ones that fit.

Best first: the search always refines the entry with the least lower bound. It refines a layout with a
microbatch size to a schedule, and a schedule to a simulated step. The first steps that leave the queue are
therefore the results of a full search.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count as numbers_from_0

from hpc_parallel.config.checks.all_checks import find_problems
from hpc_parallel.config.schema import RunConfig, StrategyConfig
from hpc_parallel.layout.counts import least_bytes
from hpc_parallel.layout.layout import Layout, layout_of
from hpc_parallel.layout.model_weights import ModelWeights, sample_shape_of, weights_of
from hpc_parallel.layout.schedules import schedule_of, unfit
from hpc_parallel.planning import memory
from hpc_parallel.planning.decoder import Kernels
from hpc_parallel.planning.hardware import Hardware
from hpc_parallel.planning.layouts import Choices, Split, Variants, layouts, overrides_of, split_of
from hpc_parallel.planning.memory import MemoryPlan
from hpc_parallel.planning.search_bounds import Bounds
from hpc_parallel.planning.step_time import StepTerms, StepTime
from hpc_parallel.planning.work import Work, work_of_run

NEAR = 8  # how many layouts are compared to find the one that needs least memory
DOUBLINGS = 6  # of the nodes, to find out how many are enough
_Refine = Callable[[], Iterator["_Entry"]]


@dataclass(frozen=True)
class Candidate:
    """One way to run a configuration, with its planned step and the memory of the fullest device."""

    config: RunConfig
    work: Work
    step: StepTime
    memory: MemoryPlan

    @property
    def layout(self) -> Layout:
        return layout_of(self.config.strategy, devices=self.config.devices)

    @property
    def overrides(self) -> list[str]:
        return overrides_of(self.config)


@dataclass(frozen=True)
class SearchResult:
    """best: the fastest candidate of each `split_of`, fastest first.

    nearest: the candidate that needs least memory, if none fits.
    """

    best: list[Candidate]
    nearest: Candidate | None = None


def search(config: RunConfig, hardware: Hardware, *, choices: Choices, most: int) -> SearchResult:
    """The `most` fastest ways to run a configuration that `unplanned` accepts, one for each `split_of`.

    The search ignores the layout and the microbatches of the configuration, except a microbatch size or a
    number of microbatches that is set.
    """
    return _Search(config, hardware, choices).run(most)


def enough_nodes(config: RunConfig, hardware: Hardware, *, choices: Choices) -> Candidate | None:
    """The fastest candidate on the fewest nodes with room: tries 2, 4, 8, ... times as many nodes."""
    for doublings in range(1, DOUBLINGS + 1):
        larger = replace(config, nodes=config.nodes * 2**doublings)
        if best := search(larger, hardware, choices=choices, most=1).best:
            return best[0]
    return None


@dataclass(order=True)
class _Entry:
    """bound_s: a lower bound of the step time, exact for a candidate.

    Next: `refine` it, or take the `candidate`.
    """

    bound_s: float
    number: int
    layout: Layout = field(compare=False)
    refine: _Refine | None = field(compare=False, default=None)
    candidate: Candidate | None = field(compare=False, default=None)

    @property
    def split(self) -> Split:
        return split_of(self.layout)


class _Search:
    def __init__(self, config: RunConfig, hardware: Hardware, choices: Choices) -> None:
        self.config, self.hardware, self.choices = config, hardware, choices
        self._kernels, self._numbers = Kernels(hardware), numbers_from_0()
        model = weights_of(config.model, sample_shape=sample_shape_of(config.model, config.data))
        assert model is not None  # `unplanned` accepts the reference decoder only
        self._model: ModelWeights = model
        self._variants = Variants(config, choices)
        self._bounds = Bounds(self._variants, model, hardware, kernels=self._kernels)

    def run(self, most: int) -> SearchResult:
        queue = list(self._layouts_with_microbatches())
        heapq.heapify(queue)
        best: dict[Split, Candidate] = {}
        while queue and len(best) < most:
            entry = heapq.heappop(queue)
            if entry.split in best:
                continue
            if entry.candidate is not None:
                best[entry.split] = entry.candidate
            elif entry.refine is not None:
                for refined in entry.refine():
                    heapq.heappush(queue, refined)
        return SearchResult(list(best.values()), None if best else self._nearest())

    def _entry(self, bound_s: float, layout: Layout, **what: object) -> _Entry:
        return _Entry(bound_s, next(self._numbers), layout, **what)  # type: ignore[arg-type]

    def _layouts_with_microbatches(self) -> Iterator[_Entry]:
        for layout in layouts(self.config, self.choices):
            if (least_bytes(self.config, layout) or 0) > self._room:
                continue
            for size in self._variants.microbatch_sizes(layout):
                for checkpointing in self.choices.checkpointing:
                    yield self._over_schedules(layout, size, checkpointing)

    def _over_schedules(self, layout: Layout, size: int, checkpointing: str) -> _Entry:
        microbatches = self._variants.microbatches(layout, size)
        any_s = self._bounds.under_any_schedule_s(layout, size, checkpointing)

        def refine() -> Iterator[_Entry]:
            for schedule in self._variants.schedules(layout):
                strategy = self._variants.strategy(layout, schedule)
                if self._runs(strategy, layout, microbatches):
                    schedule_s = self._bounds.under_schedule_s(schedule, layout, size, checkpointing)
                    bounded = partial(self._bounded, strategy, layout, size, checkpointing)
                    yield self._entry(max(any_s, schedule_s), layout, refine=bounded)

        return self._entry(any_s, layout, refine=refine)

    def _bounded(
        self, strategy: StrategyConfig, layout: Layout, size: int, checkpointing: str
    ) -> Iterator[_Entry]:
        """The bound from the times of all stages, gradients and the update, without a simulation."""
        config = self._variants.variant(strategy, size, checkpointing)
        step = StepTerms(work_of_run(config, model=self._model), self.hardware, self._kernels)
        yield self._entry(step.least_s(), layout, refine=partial(self._simulated, config, layout, step))

    def _runs(self, strategy: StrategyConfig, layout: Layout, microbatches: int) -> bool:
        """Whether the schedule can run the layout; a quick answer before all checks."""
        if layout.pipeline == 1:
            return True
        late = schedule_of(strategy).splits_backward and layout.by_fully_shard and strategy.reshard
        fits = unfit(strategy, microbatches=microbatches, ranks=layout.pipeline) is None
        return self._bounds.has_blocks(strategy, layout) and fits and not late

    def _simulated(self, config: RunConfig, layout: Layout, step: StepTerms) -> Iterator[_Entry]:
        if memory.may_fit(config, room=self._room, model=self._model):
            times = step.result()
            refine = partial(self._verified, config, layout, step.work, times)
            yield self._entry(times.total_s, layout, refine=refine)

    def _verified(self, config: RunConfig, layout: Layout, work: Work, times: StepTime) -> Iterator[_Entry]:
        """The candidate, if `run` accepts it and its memory fits."""
        planned = memory.plan_fullest(config, model=self._model)
        if planned is not None and planned.fullest.total <= self._room and not find_problems(config):
            yield self._entry(times.total_s, layout, candidate=Candidate(config, work, times, planned))

    @property
    def _room(self) -> float:
        return self.hardware.device.memory_bytes

    def _nearest(self) -> Candidate | None:
        """The layout that needs least memory, among those with the fewest weights on a device."""
        possible = layouts(self.config, self.choices)
        smallest = sorted(possible, key=lambda layout: least_bytes(self.config, layout) or 0)[:NEAR]
        plans = [
            (memory.plan_fullest(config, model=self._model), config)
            for layout in smallest
            for config in self._leanest(layout)
            if all(getattr(one, "key", "") == "cluster.device_memory_gb" for one in find_problems(config))
        ]
        known = [(planned, config) for planned, config in plans if planned is not None]
        if not known:
            return None
        planned, config = min(known, key=lambda row: row[0].fullest.total)
        step = StepTerms(work_of_run(config, model=self._model), self.hardware, self._kernels)
        return Candidate(config, step.work, step.result(), planned)

    def _leanest(self, layout: Layout) -> Iterator[RunConfig]:
        """The variant of each schedule with the smallest microbatches and the last kind of checkpointing."""
        for size in self._variants.microbatch_sizes(layout)[:1]:
            for schedule in self._variants.schedules(layout):
                strategy = self._variants.strategy(layout, schedule)
                yield self._variants.variant(strategy, size, self.choices.checkpointing[-1])
