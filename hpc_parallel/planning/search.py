"""Search the layouts of a number of devices for the fastest ones that fit.

Best first: the candidate with the least lower bound is refined next, from a layout with its microbatches over
a schedule to a simulated step. The first steps that leave the queue are therefore those of a full search.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import accumulate
from itertools import count as numbers_from_0

from hpc_parallel.config.checks import context_checks, tensor_checks
from hpc_parallel.config.checks.all_checks import find_problems
from hpc_parallel.config.counts import count
from hpc_parallel.config.layout import Layout, divisors, layout_of
from hpc_parallel.config.model_bytes import least_bytes
from hpc_parallel.config.model_weights import ModelWeights, sample_shape_of, weights_of
from hpc_parallel.config.schedules import SCHEDULES, schedule_of, stages_per_rank, unfit
from hpc_parallel.config.schema import RunConfig, StrategyConfig
from hpc_parallel.planning import memory
from hpc_parallel.planning.hardware import Hardware
from hpc_parallel.planning.kernels import Kernels
from hpc_parallel.planning.memory import MemoryPlan
from hpc_parallel.planning.pipeline_orders import BACKWARD, FORWARD, Pipeline
from hpc_parallel.planning.planned_state import Division
from hpc_parallel.planning.run_work import work_of_run
from hpc_parallel.planning.shared_cores import contended
from hpc_parallel.planning.step_time import Step, StepTime
from hpc_parallel.planning.work import Work
from hpc_parallel.problems import Problem

FREE = -1  # the degree of an axis that the search chooses
AXES = ("pipeline", "replicate", "shard", "context", "tensor")
CHECKPOINTING = ("none", "full")  # the time of `selective` is not planned
NAMES = {
    (): "single", ("replicate",): "data", ("shard",): "fsdp", ("replicate", "shard"): "hsdp",
    ("context",): "context", ("tensor",): "tensor", ("pipeline",): "pipeline",
}  # fmt: skip
OTHERS = "hybrid"  # the strategy of all other layouts
NEAR = 8  # layouts that are looked at for the one that needs least memory
DOUBLINGS = 6  # of the nodes, to find out how many are enough
_Refine = Callable[[], Iterator["_Entry"]]


Split = tuple[int, int, str]


@cache
def split_of(layout: Layout) -> Split:
    """What tells rows of a result apart: pipeline, tensor, and the name of the strategy."""
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
    """best: the fastest of each `split_of`, in order. nearest: what needs least memory, if none fits."""

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


def layouts(config: RunConfig, choices: Choices) -> Iterator[Layout]:
    """All legal layouts whose degrees the choices allow, whatever memory they need."""
    blocks, batch = count(config, "blocks")[1] or 1, config.training.global_batch_size
    for tensor, context in _splits_of_samples(config):
        for pipeline in divisors(config.devices // tensor // context):
            data = config.devices // tensor // context // pipeline
            if pipeline > blocks or batch % data:
                continue
            for shard in divisors(data):
                layout = Layout(pipeline, data // shard, shard, context=context, tensor=tensor)
                if all(choices.degrees[axis] in (FREE, layout.degrees[axis]) for axis in AXES):
                    yield layout


def _splits_of_samples(config: RunConfig) -> Iterator[tuple[int, int]]:
    """The degrees of tensor and context together that can split the model's layers and a sequence."""
    for tensor in _tensor_degrees(config):
        for context in divisors(config.devices // tensor):
            if not any(context_checks.find_problems(config, Layout(context=context, tensor=tensor))):
                yield tensor, context


def _tensor_degrees(config: RunConfig) -> list[int]:
    """Those inside a node that can split the model's layers."""
    possible = [Layout(tensor=degree) for degree in divisors(config.gpus_per_node)]
    return [layout.tensor for layout in possible if not any(tensor_checks.find_problems(config, layout))]


def search(config: RunConfig, hardware: Hardware, *, choices: Choices, most: int) -> Found:
    """The `most` fastest ways to run a configuration that `unplanned` accepts, one for each `split_of`.

    Its own layout and microbatches are not looked at, but for a microbatch size or a number that is set.
    """
    return _Search(config, hardware, choices).run(most)


def enough_nodes(config: RunConfig, hardware: Hardware, *, choices: Choices) -> Candidate | None:
    """The fastest way to run it on the fewest nodes that have room: twice as many, four times, and so on."""
    for doublings in range(1, DOUBLINGS + 1):
        larger = replace(config, nodes=config.nodes * 2**doublings)
        if best := search(larger, hardware, choices=choices, most=1).best:
            return best[0]
    return None


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
    blocks: int

    @property
    def block_s(self) -> float:
        return self.forward_s + self.backward_s

    @property
    def ends_s(self) -> float:
        """At most, of the embedding and the head."""
        return self.whole_s - self.blocks * self.block_s

    def before_s(self, schedule: str | None) -> float:
        """Of a block of the stages before a rank's first one, while the rank waits."""
        splits = schedule is not None and SCHEDULES[schedule].splits_backward
        return self.forward_s if splits else self.block_s


@dataclass(frozen=True)
class _Profile:
    """How a schedule divides the blocks.

    rows: for each stage, the blocks before it, and its rank's from it on. in_front: those of the first stage.
    """

    rows: list[tuple[int, int]]
    in_front: int


def _is_of_memory(problem: Problem | str) -> bool:
    return isinstance(problem, Problem) and problem.key == "cluster.device_memory_gb"


def _exceeds(row: tuple[int, int], other: tuple[int, int]) -> bool:
    return other != row and other[0] >= row[0] and other[1] >= row[1]


class _Search:
    def __init__(self, config: RunConfig, hardware: Hardware, choices: Choices) -> None:
        self.config, self.hardware, self.choices = config, hardware, choices
        self._kernels, self._numbers = Kernels(hardware), numbers_from_0()
        shape = sample_shape_of(config.model, config.data)
        model = None if shape is None else weights_of(config.model, sample_shape=shape)
        assert model is not None  # `unplanned` accepts the reference decoder only
        self._model: ModelWeights = model
        self._known_times: dict[tuple[int, int, int, int, str], _Times] = {}
        self._strategies: dict[tuple[Layout, str | None], StrategyConfig] = {}
        self._profiles: dict[tuple[int, str], _Profile] = {}
        self._in_front: dict[int, int] = {}
        self._sent_s: dict[Layout, float] = {}

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

    def _microbatch_sizes(self, layout: Layout) -> Sequence[int]:
        training, samples = self.config.training, self.config.training.global_batch_size // layout.data
        if (microbatches := self.config.strategy.microbatches) is not None:
            return [] if samples % microbatches else [samples // microbatches]
        size = training.microbatch_size
        return divisors(samples) if size is None else [] if samples % size else [size]

    def _layouts_with_microbatches(self) -> Iterator[_Entry]:
        for layout in layouts(self.config, self.choices):
            if (least_bytes(self.config, layout) or 0) > self._room:
                continue
            for size in self._microbatch_sizes(layout):
                for checkpointing in self.choices.checkpointing:
                    yield self._over_schedules(layout, size, checkpointing)

    def _over_schedules(self, layout: Layout, size: int, checkpointing: str) -> _Entry:
        """Bounded by what the mean rank of a pipeline computes, and by one microbatch's way through it."""
        microbatches = self.config.training.global_batch_size // layout.data // size
        times, blocks = self._times(layout, size, checkpointing), self._model.blocks
        backward_s = blocks * times.backward_s + times.ends_s  # at most
        later_s = backward_s / 2 if layout.pipeline > 1 else 0.0  # gradients of weights
        alone_s = max(microbatches * times.whole_s / layout.pipeline, times.whole_s - later_s)
        any_s = alone_s + self._waits_s(layout, times, self._most_in_front(layout))

        def refine() -> Iterator[_Entry]:
            for schedule in self._schedules(layout):
                strategy = self._strategy(layout, schedule)
                if self._runs(strategy, layout, microbatches):
                    profile = self._profile(strategy, layout)
                    own_s = max(
                        microbatches * own * times.block_s + before * times.before_s(schedule)
                        for before, own in profile.rows
                    )
                    bound_s = max(any_s, own_s + self._waits_s(layout, times, profile.in_front))
                    bounded = partial(self._bounded, strategy, layout, size, checkpointing)
                    yield self._entry(bound_s, layout, refine=bounded)

        return self._entry(any_s, layout, refine=refine)

    def _most_in_front(self, layout: Layout) -> int:
        """The most blocks that the first stage has under any schedule."""
        if layout.pipeline not in self._in_front:
            strategies = [self._strategy(layout, schedule) for schedule in self._schedules(layout)]
            profiles = [self._profile(each, layout) for each in strategies if self._has_blocks(each, layout)]
            self._in_front[layout.pipeline] = max((profile.in_front for profile in profiles), default=0)
        return self._in_front[layout.pipeline]

    def _has_blocks(self, strategy: StrategyConfig, layout: Layout) -> bool:
        """Whether each stage has one."""
        return layout.pipeline == 1 or layout.pipeline * stages_per_rank(strategy) <= self._model.blocks

    def _waits_s(self, layout: Layout, times: _Times, blocks: int) -> float:
        """At least, for gradients that a first stage with so many blocks does not hide."""
        if layout not in self._sent_s:
            size = self._microbatch_sizes(layout)[-1]
            config = self._config(self._strategy(layout, None), size, self.choices.checkpointing[0])
            work = replace(work_of_run(config, model=self._model), schedule="1f1b", per_rank=1)
            self._sent_s[layout] = Step(work, self.hardware, self._kernels).exchanges.least_sent_s()
        hidden_s = blocks * times.backward_s + times.ends_s + 2 * self.hardware.host.action_s
        return max(0.0, self._sent_s[layout] - hidden_s)

    def _profile(self, strategy: StrategyConfig, layout: Layout) -> _Profile:
        key = (layout.pipeline, strategy.schedule)
        if key not in self._profiles:
            config = replace(self.config, strategy=strategy)
            blocks = list(map(len, Division(config, layout, self._model).blocks))
            before = [0, *accumulate(blocks)]
            pipeline = Pipeline(strategy.schedule, layout.pipeline, 1, len(blocks) // layout.pipeline)
            rows = [
                (before[stage], sum(blocks[later] for later in own[at:]))
                for own in map(pipeline.stages_of, range(layout.pipeline))
                for at, stage in enumerate(own)
            ]
            longest = [row for row in rows if not any(map(partial(_exceeds, row), rows))]
            self._profiles[key] = _Profile(longest, in_front=blocks[0])
        return self._profiles[key]

    def _bounded(
        self, strategy: StrategyConfig, layout: Layout, size: int, checkpointing: str
    ) -> Iterator[_Entry]:
        """With the times of all stages, gradients and the update, but without a simulation."""
        config = self._config(strategy, size, checkpointing)
        step = Step(work_of_run(config, model=self._model), self.hardware, self._kernels)
        yield self._entry(step.least_s(), layout, refine=partial(self._simulated, config, layout, step))

    def _runs(self, strategy: StrategyConfig, layout: Layout, microbatches: int) -> bool:
        """Whether the schedule can; a quick answer before that of all checks."""
        if layout.pipeline == 1:
            return True
        late = schedule_of(strategy).splits_backward and layout.by_fully_shard and strategy.reshard
        fits = unfit(strategy, microbatches=microbatches, ranks=layout.pipeline) is None
        return self._has_blocks(strategy, layout) and fits and not late

    def _simulated(self, config: RunConfig, layout: Layout, step: Step) -> Iterator[_Entry]:
        if memory.may_fit(config, room=self._room, model=self._model):
            times = step.result()
            refine = partial(self._verified, config, layout, step.work, times)
            yield self._entry(times.total_s, layout, refine=refine)

    def _verified(self, config: RunConfig, layout: Layout, work: Work, times: StepTime) -> Iterator[_Entry]:
        """The candidate, if `run` takes it and it fits."""
        planned = memory.plan_fullest(config, model=self._model)
        if planned is not None and planned.fullest.total <= self._room and not find_problems(config):
            yield self._entry(times.total_s, layout, candidate=Candidate(config, work, times, planned))

    @property
    def _room(self) -> float:
        return self.hardware.device.memory_bytes

    def _times(self, layout: Layout, size: int, checkpointing: str) -> _Times:
        """The devices of one stage compute at the same time; those of others may wait."""
        devices = self.config.devices
        busy = contended(self.hardware, devices=devices / layout.pipeline)
        kernels = self._kernels if busy is self.hardware else None
        others = 1 if kernels else layout.pipeline  # stages that do not compute meanwhile
        key = (others, layout.context, layout.tensor, size, checkpointing)
        if key not in self._known_times:
            flat = Layout(
                replicate=devices // layout.context // layout.tensor,
                context=layout.context, tensor=layout.tensor,
            )  # fmt: skip
            config = self._config(self._strategy(flat, None), size, checkpointing)
            training = replace(config.training, global_batch_size=size * flat.data)
            work = work_of_run(replace(config, training=training), model=self._model)
            step = Step(work, replace(busy, shared_cores=None) if busy.shared_cores else busy, kernels)
            self._known_times[key] = _Times(
                step.microbatch_s(), step.block_s(FORWARD), step.block_s(BACKWARD), self._model.blocks
            )
        return self._known_times[key]

    def _strategy(self, layout: Layout, schedule: str | None) -> StrategyConfig:
        key = (layout, schedule)
        if key not in self._strategies:
            self._strategies[key] = replace(
                self.config.strategy,
                name=name_of(layout),
                schedule=schedule or self.config.strategy.schedule,
                pipeline=layout.pipeline,
                replicate=layout.replicate,
                shard=layout.shard,
                context=layout.context,
                tensor=layout.tensor,
            )
        return self._strategies[key]

    def _config(self, strategy: StrategyConfig, size: int, checkpointing: str) -> RunConfig:
        training = replace(self.config.training, microbatch_size=size, activation_checkpointing=checkpointing)
        return replace(self.config, strategy=strategy, training=training)

    def _nearest(self) -> Candidate | None:
        """Of the layouts with the fewest weights on a device, the one that needs least memory."""
        possible = layouts(self.config, self.choices)
        smallest = sorted(possible, key=lambda layout: least_bytes(self.config, layout) or 0)[:NEAR]
        plans = [
            (memory.plan_fullest(config, model=self._model), config)
            for layout in smallest
            for config in self._leanest(layout)
            if all(map(_is_of_memory, find_problems(config)))
        ]
        ways = [(planned.fullest.total, planned, config) for planned, config in plans if planned is not None]
        if not ways:
            return None
        _, planned, config = min(ways, key=lambda way: way[0])
        step = Step(work_of_run(config, model=self._model), self.hardware, self._kernels)
        return Candidate(config, step.work, step.result(), planned)

    def _leanest(self, layout: Layout) -> Iterator[RunConfig]:
        """With the smallest microbatches and the last kind of checkpointing, over all schedules."""
        for size in self._microbatch_sizes(layout)[:1]:
            for schedule in self._schedules(layout):
                strategy = self._strategy(layout, schedule)
                yield self._config(strategy, size, self.choices.checkpointing[-1])

    def _schedules(self, layout: Layout) -> tuple[str | None, ...]:
        return self.choices.schedules if layout.pipeline > 1 else (None,)
