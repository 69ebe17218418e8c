"""The plan of a run: its layout, and the split of its global batch over replicas and microbatches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from hpc_parallel.layout.counts import fitting_samples
from hpc_parallel.layout.layout import Layout, divisors, layout_of
from hpc_parallel.layout.model_data_schema import ConvNetConfig, SegmenterConfig, UNetConfig
from hpc_parallel.layout.schedules import schedule_of, stages_per_rank
from hpc_parallel.layout.shares import KEY, apportion, batch_shares, fits, slowdown
from hpc_parallel.problems import Problem, Problems, spell

if TYPE_CHECKING:
    from hpc_parallel.config.schema import RunConfig, StrategyConfig

SHOWN = 8  # replicas
USUAL_BATCH = 16
# Digits are small images. Images of any size may be large, so few of them fit on a device.
USUAL_BATCH_OF = {ConvNetConfig._target_: 64, SegmenterConfig._target_: 8, UNetConfig._target_: 8}


@dataclass(frozen=True)
class BatchPlan:
    """The split of the global batch: each of `data` replicas has a part of each of the `microbatches`.

    A part has `microbatch_size` samples; with `shares`, it has this number on average.
    """

    data: int
    microbatches: int
    microbatch_size: int
    shares: Sequence[float] | None = None

    @property
    def samples_per_replica(self) -> int:
        """The samples of one replica in a step; with `shares`, on average."""
        return self.microbatches * self.microbatch_size

    @property
    def samples_per_microbatch(self) -> int:
        """The samples of all replicas in one microbatch. BatchNorm takes its statistics over them."""
        return self.data * self.microbatch_size

    @property
    def sizes(self) -> tuple[int, ...]:
        """The samples of each replica in one microbatch."""
        if self.shares is None:
            return (self.microbatch_size,) * self.data
        return apportion(self.data * self.microbatch_size, self.shares)

    def __str__(self) -> str:
        if self.shares is None:
            product = f"{self.data} x {self.microbatches} x {self.microbatch_size}"
            return f"{product} (replicas x microbatches x samples)"
        sizes = " + ".join(map(str, self.sizes[:SHOWN])) + " + ..." * (self.data > SHOWN)
        return f"{self.microbatches} x ({sizes}) (microbatches x samples of each replica)"

    def weight(self, replica: int | None) -> float:
        """The factor of a replica's mean loss.

        With these factors, the mean over replicas equals the mean over all samples.
        """
        return 1.0 if replica is None else self.sizes[replica] / self.microbatch_size


@dataclass(frozen=True)
class Plan:
    """How a run is laid out: the degree of each axis, and the split of the global batch.

    `prepare` makes it on the login node; each rank makes it again from `config.yaml`.
    """

    layout: Layout
    batch: BatchPlan

    @classmethod
    def of(cls, config: RunConfig) -> Plan:
        """The plan of a resolved configuration. Raises ValueError as `layout_of` and `plan_batch` do."""
        layout = layout_of(config.strategy, devices=config.devices)
        return cls(layout, batch_of(config, layout))


def batch_of(config: RunConfig, layout: Layout) -> BatchPlan:
    """The batch plan of a run. Raises ValueError as `plan_batch` does."""
    undecided = config.training.microbatch_size is None and config.strategy.microbatches is None
    return plan_batch(
        config.training.global_batch_size,
        layout=layout,
        microbatch_size=config.training.microbatch_size,
        microbatches=config.strategy.microbatches,
        in_turn=schedule_of(config.strategy).in_turn,
        shares=batch_shares(config.strategy.shares, layout),
        fitting=fitting_samples(config, layout) if undecided else None,
    )


def plan_batch(
    global_batch_size: int,
    *,
    layout: Layout,
    microbatch_size: int | None,
    microbatches: int | None,
    in_turn: bool = False,
    shares: Sequence[float] | None = None,
    fitting: int | None = None,
) -> BatchPlan:
    """Split the global batch without remainder.

    If neither number is given, there are as few microbatches as possible, each of at most `fitting` samples,
    the number that fits in a device's memory. A pipeline has up to four microbatches for each stage, because
    the idle share of a pipeline of P stages and M microbatches is (P-1)/(M+P-1) (Huang et al. 2019, GPipe).
    It has a multiple of that number of microbatches if they would not fit otherwise. If the microbatches run
    one after the other (`in_turn`), the idle share is (P-1)/P for any number.

    Raises ValueError if the split leaves a remainder or the two numbers contradict each other.
    """
    samples, remainder = divmod(global_batch_size, layout.data)
    if remainder:
        raise ValueError(f"{global_batch_size} samples over {layout.data} replicas")
    if microbatches is None:
        if microbatch_size is not None:
            microbatches = max(1, samples // microbatch_size)
        elif layout.pipeline > 1 and not in_turn:
            most = min(samples, 4 * layout.pipeline)
            microbatches = max(count for count in divisors(samples) if count <= most)
            microbatches = _fewest(samples, fitting=fitting, multiple_of=microbatches)
        else:
            microbatches = _fewest(samples, fitting=fitting)
    size = microbatch_size or max(1, samples // microbatches)
    if microbatches * size != samples:
        raise ValueError(f"{samples} samples in {microbatches} microbatches of {size}")
    return BatchPlan(layout.data, microbatches, microbatch_size=size, shares=shares)


def _fewest(samples: int, *, fitting: int | None, multiple_of: int = 1) -> int:
    """The least number of equal microbatches of at most `fitting` samples; the largest if none fits."""
    counts = [count for count in divisors(samples) if count % multiple_of == 0] or [1]
    return next((count for count in counts if fitting is None or samples // count <= fitting), counts[-1])


def shares_batch_problems(config: RunConfig, plan: BatchPlan) -> Problems:
    """A microbatch is split into whole samples, which must come near the shares."""
    shares, training = plan.shares, config.training
    if shares is None or fits(plan.data, plan.microbatch_size, shares):
        return
    rule = (
        f"is split by {KEY} = {spell(config.strategy.shares)} into {plan}, which takes "
        f"{slowdown(plan.sizes, shares):.2f} times as long as an exact split"
    )
    if training.microbatch_size is not None:
        sizes = [size for size in divisors(plan.samples_per_replica) if fits(plan.data, size, shares)]
        if sizes:
            yield Problem("training.microbatch_size", training.microbatch_size, rule, (sizes[0],))
            return
    microbatches = plan.microbatches if training.microbatch_size is None else 1
    size = next(size for size in itertools.count(plan.samples_per_replica) if fits(plan.data, size, shares))
    along = () if training.microbatch_size is None else ("training.microbatch_size=null",)
    batch = plan.data * microbatches * size
    yield Problem("training.global_batch_size", training.global_batch_size, rule, (batch,), along)


def usual_batch_size(model: Any) -> int:
    """The usual global batch size of a model on one device. `model`: its table, with its class."""
    target = model.get("_target_") if isinstance(model, Mapping) else None
    return USUAL_BATCH_OF.get(str(target), USUAL_BATCH)


def default_batch_size(values: Mapping[str, Any]) -> int:
    """Returns the smallest number that the layout can split, but at least the model's usual number.

    `values`: a resolved configuration. Returns the usual number if the layout is wrong; checks report it.
    """
    least = usual_batch_size(values.get("model"))
    strategy = cast("StrategyConfig", SimpleNamespace(**values["strategy"]))
    try:
        layout = layout_of(strategy, devices=values["nodes"] * values["gpus_per_node"])
        unit = layout.data * _least_microbatches(strategy, stages=layout.pipeline)
        unit *= values["training"]["microbatch_size"] or 1
    except (ValueError, TypeError, ZeroDivisionError):
        return least
    return math.ceil(least / unit) * unit if unit > 0 else least


def _least_microbatches(strategy: StrategyConfig, *, stages: int) -> int:
    if strategy.microbatches is not None:
        return strategy.microbatches
    return stages * stages_per_rank(strategy) if stages > 1 and schedule_of(strategy).full else 1
