"""Search the layouts of a number of devices for the fastest ones that fit.

Best first: the candidate with the least lower bound is refined next, from a layout with its microbatches over
a schedule to a simulated step. The first steps that leave the queue are therefore those of a full search.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate
from itertools import count as numbers

from hpc_parallel.config.batch_plan import batch_of
from hpc_parallel.config.checks import tensor_checks
from hpc_parallel.config.checks.all_checks import find_problems
from hpc_parallel.config.layout import Layout, divisors, layout_of
from hpc_parallel.config.model_bytes import least_bytes
from hpc_parallel.config.model_weights import ModelWeights, sample_shape_of, weights_of
from hpc_parallel.config.schedules import SCHEDULES, schedule_of, stages_of, stages_per_rank, unfit
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.planning import memory
from hpc_parallel.planning.hardware import Hardware
from hpc_parallel.planning.kernels import Kernels
from hpc_parallel.planning.memory import MemoryPlan
from hpc_parallel.planning.pipeline_orders import BACKWARD, FORWARD
from hpc_parallel.planning.planned_state import Division
from hpc_parallel.planning.run_work import work_of_run
from hpc_parallel.planning.step_time import Step, StepTime, Work

FREE = -1  # the degree of an axis that the search chooses
AXES = ("pipeline", "replicate", "shard", "tensor")
CHECKPOINTING = ("none", "full")  # the time of `selective` is not planned
NAMES = {
    (): "single", ("replicate",): "data", ("shard",): "fsdp", ("replicate", "shard"): "hsdp",
    ("tensor",): "tensor", ("pipeline",): "pipeline",
}  # fmt: skip
OTHERS = "hybrid"  # the strategy of all other layouts
NEAR = 8  # layouts that are looked at for the one that needs least memory
_Refine = Callable[[], Iterator["_Entry"]]


Split = tuple[int, int, str]


def split_of(layout: Layout) -> Split:
    """What tells layouts apart: pipeline, tensor, and the name of the strategy. A split is in a result once."""
    return layout.pipeline, layout.tensor, name_of(layout)


def name_of(layout: Layout) -> str:
    """The strategy of conf/strategy that a layout belongs to."""
    return NAMES.get(tuple(axis for axis in AXES if layout.degrees[axis] > 1), OTHERS)


@dataclass(frozen=True)
class Choices:
    """What a search may choose: the degree of each of AXES (FREE, or one value), schedules, checkpointing."""

    degrees: dict[str, int] = field(default_factory=lambda: dict.fromkeys(AXES, FREE))
    schedules: tuple[str, ...] = tuple(name for name, rules in SCHEDULES.items() if not rules.in_turn)
    checkpointing: tuple[str, ...] = CHECKPOINTING


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
    def words(self) -> list[str]:
        """The overrides that choose it."""
        return words_of(self.config)


@dataclass(frozen=True)
class Found:
    """best: the fastest candidate of each layout, in order. nearest: the one that needs least memory, if none fits."""

    best: list[Candidate]
    nearest: Candidate | None = None


def words_of(config: RunConfig) -> list[str]:
    """The overrides that choose a candidate's layout, schedule, microbatches and checkpointing."""
    strategy, training = config.strategy, config.training
    axes = [axis for axis in AXES if getattr(strategy, axis) > 1 or strategy.name == OTHERS]
    schedule = [f"strategy.schedule={strategy.schedule}"] if strategy.pipeline > 1 else []
    return [
        f"strategy={strategy.name}",
        *(f"strategy.{axis}={getattr(strategy, axis)}" for axis in axes),
        *schedule,
        f"training.global_batch_size={training.global_batch_size}",
        f"training.microbatch_size={training.microbatch_size}",
        f"training.activation_checkpointing={training.activation_checkpointing}",
    ]


def search(config: RunConfig, hardware: Hardware, *, choices: Choices, most: int) -> Found:
    """The fastest ways to run a configuration that `unplanned` accepts, at most one for each layout.

    Its own layout and microbatches are not looked at, but for a microbatch size or a number that is set.
    """
    return _Search(config, hardware, choices).run(most)


@dataclass(order=True)
class _Entry:
    """bound_s: of the step, exact for a candidate. What is next: `refine` it, or take the `candidate`."""

    bound_s: float
    number: int
    layout: Layout = field(compare=False)
    refine: _Refine | None = field(compare=False, default=None)
    candidate: Candidate | None = field(compare=False, default=None)

    @property
    def split(self) -> Split:
        return split_of(self.layout)


@dataclass(frozen=True)
class _Times:
    """Seconds of one microbatch: in the whole model, and at least in each block, forward and backward."""

    whole_s: float
    forward_s: float
    backward_s: float

    @property
    def block_s(self) -> float:
        return self.forward_s + self.backward_s

    def before_s(self, schedule: str | None) -> float:
        """Of a block of the stages before a rank's first one, while the rank waits."""
        splits = schedule is not None and SCHEDULES[schedule].splits_backward
        return self.forward_s if splits else self.block_s


def _exceeds(row: tuple[int, int], other: tuple[int, int]) -> bool:
    return other != row and other[0] >= row[0] and other[1] >= row[1]


class _Search:
    def __init__(self, config: RunConfig, hardware: Hardware, choices: Choices) -> None:
        self.config, self.hardware, self.choices = config, hardware, choices
        self._kernels, self._numbers = Kernels(hardware), numbers()
        shape = sample_shape_of(config.model, config.data)
        model = None if shape is None else weights_of(config.model, sample_shape=shape)
        assert model is not None  # `unplanned` accepts the reference decoder only
        self._model: ModelWeights = model
        self._known_times: dict[tuple[int, int, str], _Times] = {}
        self._profiles: dict[tuple[int, str], list[tuple[int, int]]] = {}

    def run(self, most: int) -> Found:
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
        return Found(list(best.values()), None if best else self._nearest())

    def _entry(self, bound_s: float, layout: Layout, **what: object) -> _Entry:
        return _Entry(bound_s, next(self._numbers), layout, **what)  # type: ignore[arg-type]

    def layouts(self) -> Iterator[Layout]:
        """All legal layouts whose degrees the choices allow, whatever they need."""
        config, degrees = self.config, self.choices.degrees
        for tensor in self._tensor_degrees:
            for pipeline in divisors(config.devices // tensor):
                data = config.devices // tensor // pipeline
                if pipeline > self._model.blocks or config.training.global_batch_size % data:
                    continue
                for shard in divisors(data):
                    layout = Layout(pipeline, data // shard, shard, tensor=tensor)
                    if all(degrees[axis] in (FREE, layout.degrees[axis]) for axis in AXES):
                        yield layout

    @cached_property
    def _tensor_degrees(self) -> list[int]:
        """Those inside a node that can split the model's layers."""
        layouts = [Layout(tensor=degree) for degree in divisors(self.config.gpus_per_node)]
        return [one.tensor for one in layouts if not any(tensor_checks.find_problems(self.config, one))]

    def _microbatch_sizes(self, layout: Layout) -> Sequence[int]:
        training, samples = self.config.training, self.config.training.global_batch_size // layout.data
        if (microbatches := self.config.strategy.microbatches) is not None:
            return [] if samples % microbatches else [samples // microbatches]
        size = training.microbatch_size
        return divisors(samples) if size is None else [] if samples % size else [size]

    def _layouts_with_microbatches(self) -> Iterator[_Entry]:
        room = self.hardware.device.memory_bytes
        for layout in self.layouts():
            if (least_bytes(self.config, layout) or 0) > room:
                continue
            for size in self._microbatch_sizes(layout):
                for checkpointing in self.choices.checkpointing:
                    yield self._over_schedules(layout, size, checkpointing)

    def _over_schedules(self, layout: Layout, size: int, checkpointing: str) -> _Entry:
        """Bounded by the time in which the mean rank of a pipeline computes."""
        microbatches = self.config.training.global_batch_size // layout.data // size
        times = self._times(layout.tensor, size, checkpointing)

        def refine() -> Iterator[_Entry]:
            for schedule in self.choices.schedules if layout.pipeline > 1 else (None,):
                config = self._config(layout, size, checkpointing, schedule=schedule)
                if self._runs(config, layout, microbatches):
                    bound_s = max(
                        microbatches * own * times.block_s + before * times.before_s(schedule)
                        for before, own in self._profile(config, layout)
                    )
                    yield self._entry(bound_s, layout, refine=partial(self._bounded, config, layout))

        return self._entry(microbatches * times.whole_s / layout.pipeline, layout, refine=refine)

    def _profile(self, config: RunConfig, layout: Layout) -> list[tuple[int, int]]:
        """For each rank of a pipeline, the blocks before its first stage, and its own."""
        key = (layout.pipeline, config.strategy.schedule)
        if key not in self._profiles:
            blocks = list(map(len, Division(config, layout, self._model).blocks))
            before = [0, *accumulate(blocks)]
            rules, per_rank = schedule_of(config.strategy), stages_per_rank(config.strategy)
            ranks = [
                stages_of(rank, degree=layout.pipeline, per_rank=per_rank, v_shaped=rules.v_shaped)
                for rank in range(layout.pipeline)
            ] if layout.pipeline > 1 else [[0]]  # fmt: skip
            rows = [(before[own[0]], sum(blocks[stage] for stage in own)) for own in ranks]
            self._profiles[key] = [row for row in rows if not any(map(partial(_exceeds, row), rows))]
        return self._profiles[key]

    def _bounded(self, config: RunConfig, layout: Layout) -> Iterator[_Entry]:
        """With the times of all stages, gradients and the update, but without a simulation."""
        step = Step(work_of_run(config, model=self._model), self.hardware, self._kernels)
        yield self._entry(step.least_s(), layout, refine=partial(self._simulated, config, layout, step))

    def _runs(self, config: RunConfig, layout: Layout, microbatches: int) -> bool:
        """Whether the schedule can; a quick answer before that of all checks."""
        strategy = config.strategy
        if layout.pipeline == 1:
            return True
        stages = layout.pipeline * stages_per_rank(strategy)
        late = schedule_of(strategy).splits_backward and layout.by_fully_shard and strategy.reshard
        fits = unfit(strategy, microbatches=microbatches, ranks=layout.pipeline) is None
        return stages <= self._model.blocks and fits and not late

    def _simulated(self, config: RunConfig, layout: Layout, step: Step) -> Iterator[_Entry]:
        room = self.hardware.device.memory_bytes
        planned = memory.plan_fullest(config, model=self._model, room=room)
        if planned is None or planned.fullest.total > room or find_problems(config):
            return
        times = step.result()
        candidate = Candidate(config, step.work, times, planned)
        yield self._entry(times.total_s, layout, candidate=candidate)

    def _times(self, tensor: int, size: int, checkpointing: str) -> _Times:
        key = (tensor, size, checkpointing)
        if key not in self._known_times:
            layout = Layout(replicate=self.config.devices // tensor, tensor=tensor)
            config = self._config(layout, size, checkpointing)
            training = replace(config.training, global_batch_size=size * layout.data)
            work = work_of_run(replace(config, training=training), model=self._model)
            step = Step(work, self.hardware, self._kernels)
            self._known_times[key] = _Times(step.microbatch_s(), step.block_s(FORWARD), step.block_s(BACKWARD))
        return self._known_times[key]

    def _config(self, layout: Layout, size: int, checkpointing: str, *, schedule: str | None = None) -> RunConfig:
        degrees = {axis: layout.degrees[axis] for axis in AXES}
        before = self.config.strategy
        strategy = replace(before, name=name_of(layout), schedule=schedule or before.schedule, **degrees)
        training = replace(
            self.config.training, microbatch_size=size, activation_checkpointing=checkpointing
        )
        return replace(self.config, strategy=strategy, training=training)

    def _nearest(self) -> Candidate | None:
        """Of the layouts whose weights and states are smallest on a device, the one that needs least memory."""
        layouts = sorted(self.layouts(), key=lambda layout: least_bytes(self.config, layout) or 0)[:NEAR]
        ways: list[tuple[int, RunConfig, MemoryPlan]] = []
        for layout in layouts:
            for size in self._microbatch_sizes(layout)[:1]:
                for schedule in self.choices.schedules if layout.pipeline > 1 else (None,):
                    config = self._config(layout, size, self.choices.checkpointing[-1], schedule=schedule)
                    if not find_problems(config) and (planned := memory.plan_fullest(config, model=self._model)):
                        ways.append((planned.fullest.total, config, planned))
        if not ways:
            return None
        _, config, planned = min(ways, key=lambda way: way[0])
        step = Step(work_of_run(config, model=self._model), self.hardware, self._kernels)
        return Candidate(config, step.work, step.result(), planned)
