"""What a search may choose for a configuration: layout, schedule, microbatches and checkpointing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from hpc_parallel.config.checks.axis_checks import sequence_problems, tensor_problems
from hpc_parallel.config.schema import RunConfig, StrategyConfig
from hpc_parallel.layout.counts import count
from hpc_parallel.layout.layout import Layout, divisors
from hpc_parallel.layout.schedules import SCHEDULES

FREE = -1  # the degree of an axis that the search chooses
AXES = ("pipeline", "replicate", "shard", "context", "tensor")
CHECKPOINTING = ("none", "full")  # the time of `selective` is not planned
NAMES = {
    (): "single", ("replicate",): "data", ("shard",): "fsdp", ("replicate", "shard"): "hsdp",
    ("context",): "context", ("tensor",): "tensor", ("pipeline",): "pipeline",
}  # fmt: skip
OTHERS = "hybrid"  # the strategy of all other layouts

Split = tuple[int, int, str]


@cache
def split_of(layout: Layout) -> Split:
    """The key of a result's row: pipeline, tensor, and the name of the strategy."""
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


def overrides_of(config: RunConfig) -> list[str]:
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
    """The pairs of tensor and context degrees that can split the model's layers and a sequence."""
    for tensor in divisors(config.gpus_per_node):
        if any(tensor_problems(config, Layout(tensor=tensor))):
            continue
        for context in divisors(config.devices // tensor):
            if not any(sequence_problems(config, Layout(context=context, tensor=tensor))):
                yield tensor, context


class Variants:
    """The variants of a configuration that the choices allow."""

    def __init__(self, config: RunConfig, choices: Choices) -> None:
        self.config, self.choices = config, choices
        self._strategies: dict[tuple[Layout, str | None], StrategyConfig] = {}

    def microbatches(self, layout: Layout, size: int) -> int:
        """The number of microbatches of `size` samples on each replica."""
        return self.config.training.global_batch_size // layout.data // size

    def microbatch_sizes(self, layout: Layout) -> Sequence[int]:
        """The possible sizes, smallest first; none if the batch does not divide as the configuration says."""
        training, samples = self.config.training, self.config.training.global_batch_size // layout.data
        if (microbatches := self.config.strategy.microbatches) is not None:
            return [] if samples % microbatches else [samples // microbatches]
        size = training.microbatch_size
        return divisors(samples) if size is None else [] if samples % size else [size]

    def schedules(self, layout: Layout) -> tuple[str | None, ...]:
        """The possible schedules; None stands for no pipeline."""
        return self.choices.schedules if layout.pipeline > 1 else (None,)

    def strategy(self, layout: Layout, schedule: str | None) -> StrategyConfig:
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

    def variant(self, strategy: StrategyConfig, size: int, checkpointing: str) -> RunConfig:
        training = replace(self.config.training, microbatch_size=size, activation_checkpointing=checkpointing)
        return replace(self.config, strategy=strategy, training=training)
