"""Lower bounds of a step's time, which decide what a search refines next. They need no simulation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

from hpc_parallel.config.schema import StrategyConfig
from hpc_parallel.layout.layout import Layout
from hpc_parallel.layout.model_weights import ModelWeights
from hpc_parallel.layout.schedules import schedule_named, stages_per_rank
from hpc_parallel.planning.decoder import Kernels
from hpc_parallel.planning.hardware import Hardware, contended
from hpc_parallel.planning.layouts import Variants
from hpc_parallel.planning.pipeline_orders import BACKWARD, FORWARD, Pipeline
from hpc_parallel.planning.planned_state import Division
from hpc_parallel.planning.step_time import StepTerms
from hpc_parallel.planning.work import work_of_run


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
        """An upper bound for the embedding and the head."""
        return self.whole_s - self.blocks * self.block_s

    def before_s(self, schedule: str | None) -> float:
        """The wait of a rank for one block of the stages before its first stage."""
        splits = schedule is not None and schedule_named(schedule).splits_backward
        return self.forward_s if splits else self.block_s


@dataclass(frozen=True)
class _Profile:
    """How a schedule divides the blocks.

    rows: for each stage, the number of blocks before it, and the number of its rank's blocks from this stage
    on. in_front: the number of blocks of the first stage.
    """

    rows: list[tuple[int, int]]
    in_front: int


class Bounds:
    """Lower bounds for the variants of a configuration. `kernels`: the kernel times, shared with steps."""

    def __init__(
        self, variants: Variants, model: ModelWeights, hardware: Hardware, *, kernels: Kernels
    ) -> None:
        self._variants, self._model, self._hardware, self._kernels = variants, model, hardware, kernels
        self._known_times: dict[tuple[int, int, int, int, str], _Times] = {}
        self._profiles: dict[tuple[int, str], _Profile] = {}
        self._in_front: dict[int, int] = {}
        self._sent_s: dict[Layout, float] = {}

    def under_any_schedule_s(self, layout: Layout, size: int, checkpointing: str) -> float:
        """A bound from the work of a pipeline's mean rank and from the time of one microbatch through it.

        size: the samples of a microbatch.
        """
        microbatches = self._variants.microbatches(layout, size)
        times, blocks = self._times(layout, size, checkpointing), self._model.blocks
        backward_s = blocks * times.backward_s + times.ends_s  # at most
        later_s = backward_s / 2 if layout.pipeline > 1 else 0.0  # gradients of weights
        alone_s = max(microbatches * times.whole_s / layout.pipeline, times.whole_s - later_s)
        return alone_s + self._waits_s(layout, times, self._most_in_front(layout))

    def under_schedule_s(self, schedule: str | None, layout: Layout, size: int, checkpointing: str) -> float:
        """A bound from the work of a pipeline's busiest rank. `size`: the samples of a microbatch."""
        microbatches = self._variants.microbatches(layout, size)
        times = self._times(layout, size, checkpointing)
        profile = self._profile(self._variants.strategy(layout, schedule), layout)
        rank_s = max(
            microbatches * of_rank * times.block_s + before * times.before_s(schedule)
            for before, of_rank in profile.rows
        )
        return rank_s + self._waits_s(layout, times, profile.in_front)

    def _most_in_front(self, layout: Layout) -> int:
        """The most blocks that the first stage has under any schedule."""
        if layout.pipeline not in self._in_front:
            variants = self._variants
            strategies = [variants.strategy(layout, schedule) for schedule in variants.schedules(layout)]
            profiles = [
                self._profile(strategy, layout)
                for strategy in strategies
                if self.has_blocks(strategy, layout)
            ]
            self._in_front[layout.pipeline] = max((profile.in_front for profile in profiles), default=0)
        return self._in_front[layout.pipeline]

    def has_blocks(self, strategy: StrategyConfig, layout: Layout) -> bool:
        """Whether each stage has a block."""
        return layout.pipeline == 1 or layout.pipeline * stages_per_rank(strategy) <= self._model.blocks

    def _waits_s(self, layout: Layout, times: _Times, blocks: int) -> float:
        """The least wait for gradients that a first stage with this number of `blocks` does not hide."""
        if layout not in self._sent_s:
            variants = self._variants
            size, checkpointing = variants.microbatch_sizes(layout)[-1], variants.choices.checkpointing[0]
            config = variants.variant(variants.strategy(layout, None), size, checkpointing)
            work = replace(work_of_run(config, model=self._model), schedule="1f1b", per_rank=1)
            self._sent_s[layout] = StepTerms(work, self._hardware, self._kernels).exchanges.least_sent_s()
        hidden_s = blocks * times.block_s + times.ends_s + 2 * self._hardware.host.action_s
        return max(0.0, self._sent_s[layout] - hidden_s)

    def _profile(self, strategy: StrategyConfig, layout: Layout) -> _Profile:
        key = (layout.pipeline, strategy.schedule)
        if key not in self._profiles:
            config = replace(self._variants.config, strategy=strategy)
            blocks = list(map(len, Division(config, layout, self._model).blocks))
            before = [0, *accumulate(blocks)]
            pipeline = Pipeline(strategy.schedule, layout.pipeline, 1, len(blocks) // layout.pipeline)
            rows = [
                (before[stage], sum(blocks[later] for later in stages[at:]))
                for stages in map(pipeline.stages_of, range(layout.pipeline))
                for at, stage in enumerate(stages)
            ]
            longest = [
                row
                for row in rows
                if not any(other != row and other[0] >= row[0] and other[1] >= row[1] for other in rows)
            ]
            self._profiles[key] = _Profile(longest, in_front=blocks[0])
        return self._profiles[key]

    def _times(self, layout: Layout, size: int, checkpointing: str) -> _Times:
        """The devices of one stage compute at the same time; the devices of other stages may wait."""
        devices = self._variants.config.devices
        busy = contended(self._hardware, devices=devices / layout.pipeline)
        kernels = self._kernels if busy is self._hardware else None
        others = 1 if kernels else layout.pipeline  # with contention, times depend on the number of stages
        key = (others, layout.context, layout.tensor, size, checkpointing)
        if key not in self._known_times:
            flat = Layout(
                replicate=devices // layout.context // layout.tensor,
                context=layout.context, tensor=layout.tensor,
            )  # fmt: skip
            config = self._variants.variant(self._variants.strategy(flat, None), size, checkpointing)
            training = replace(config.training, global_batch_size=size * flat.data)
            work = work_of_run(replace(config, training=training), model=self._model)
            step = StepTerms(work, replace(busy, shared_cores=None) if busy.shared_cores else busy, kernels)
            self._known_times[key] = _Times(
                step.microbatch_s(), step.block_s(FORWARD), step.block_s(BACKWARD), self._model.blocks
            )
        return self._known_times[key]
