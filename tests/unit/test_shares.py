"""A batch or a pipeline split by speed: whole samples, whole blocks, and what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_parallel.config.checks.all_checks import find_problems
from hpc_parallel.config.resolve import resolve
from hpc_parallel.data.sampler import Batches
from hpc_parallel.layout.batch_plan import BatchPlan
from hpc_parallel.layout.layout import Layout
from hpc_parallel.layout.shares import apportion, batch_shares, slowdown
from hpc_parallel.layout.stage_cuts import balance
from hpc_parallel.models.layered import PartCosts
from hpc_parallel.start.start_times import shares_of
from tests.composed import composed


@given(st.lists(st.integers(1, 100), min_size=1, max_size=4), st.integers(0, 8))
@settings(max_examples=60)
def test_no_other_split_is_faster(shares: list[int], extra: int) -> None:
    """All splits are tried: none has a smaller largest part / share."""
    total = len(shares) + extra
    parts = apportion(total, shares)
    assert sum(parts) == total
    assert min(parts) >= 1

    def time(split: tuple[int, ...]) -> float:
        return max(part / share for part, share in zip(split, shares, strict=True))

    splits = itertools.product(range(1, total + 1), repeat=len(shares))
    assert time(parts) == min(time(split) for split in splits if sum(split) == total)


def test_splits_by_hand() -> None:
    assert apportion(16, [3, 1]) == (12, 4)
    assert apportion(8, [1, 1]) == (4, 4)
    assert apportion(4, [100, 1, 1, 1]) == (1, 1, 1, 1)
    assert slowdown([6, 2], [3, 1]) == 1
    assert slowdown([1, 1], [3, 1]) == 2  # the second needs 1 / (1/4) of the time of two samples


def test_the_weights_of_replicas_make_one_mean() -> None:
    plan = BatchPlan(data=2, microbatches=4, microbatch_size=4, shares=[3, 1])
    assert plan.sizes == (6, 2)
    means = [5.0, 1.0]
    of_all_samples = (6 * means[0] + 2 * means[1]) / 8
    assert sum(plan.weight(r) * mean for r, mean in enumerate(means)) / 2 == of_all_samples
    assert plan.weight(None) == 1  # of a server


def test_replicas_have_their_part_of_each_microbatch() -> None:
    """Together they have the samples of one device's microbatches, each sample once."""
    parts = [
        Batches(
            samples=[0] * 100, global_batch_size=16, seed=1, replica=replica, replicas=2, microbatches=2,
            sizes=(6, 2),
        ).indices(1).reshape(2, -1).tolist()
        for replica in range(2)
    ]  # fmt: skip
    assert parts[0] == [[16, 17, 18, 19, 20, 21], [24, 25, 26, 27, 28, 29]]
    assert parts[1] == [[22, 23], [30, 31]]


@pytest.mark.parametrize("sizes", [(8, 8), (7, 2), (8,), (8, 0)])
def test_sizes_that_are_no_microbatch_are_an_error(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="not a microbatch"):
        Batches(
            samples=[0] * 9, global_batch_size=16, seed=1, replicas=2, microbatches=2, sizes=sizes
        )  # fmt: skip


def test_blocks_are_balanced_by_speed() -> None:
    """Every cut of twelve equal blocks is tried."""
    costs = PartCosts(stem=5, blocks=(10,) * 12, head=20)
    speeds = [3.0, 1.0, 2.0]
    stages = balance(costs, stages=3, speeds=speeds)

    def longest(first: int, second: int) -> float:
        times = 5 + 10 * first, 10 * (second - first), 10 * (12 - second) + 20
        return max(time / speed for time, speed in zip(times, speeds, strict=True))

    best = min(longest(a, b) for a in range(1, 11) for b in range(a + 1, 12))
    assert longest(stages[0].stop, stages[1].stop) == best
    assert [len(stage) for stage in balance(costs, stages=3)] != [len(stage) for stage in stages]


def test_a_part_is_as_fast_as_its_slowest_rank() -> None:
    assert shares_of([1.0, 2.0, 1.0, 1.0], Layout(replicate=2, tensor=2)) == [0.5, 1.0]
    assert shares_of([4.0, 1.0], Layout(pipeline=2)) == [0.25, 1.0]
    assert shares_of([1.0, 1e6], Layout(replicate=2)) == [1.0, 0.01]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("strategy=data nodes=2 strategy.shares=[3,1,1]",
         "strategy.shares = [3,1,1] has 3 numbers, but there are 2 replicas. "
         "Try strategy.shares=[3,1] or strategy.shares=measured."),
        ("strategy=pipeline nodes=4 strategy.shares=[3,1]",
         "strategy.shares = [3,1] has 2 numbers, but there are 4 ranks of the pipeline. "
         "Try strategy.shares=[3,1,1,1] or strategy.shares=measured."),
        ("strategy=data nodes=2 strategy.shares=[3,0]",
         "strategy.shares = [3,0] must be a list of numbers above 0, one for each of the 2 replicas, or "
         "measured. Try strategy.shares=[3,1] or strategy.shares=measured."),
        ("strategy=data nodes=2 strategy.shares=measurd",
         "strategy.shares = measurd must be a list of numbers above 0, one for each of the 2 replicas, or "
         "measured. Try strategy.shares=[1,1] or strategy.shares=measured."),
        ("strategy=data nodes=2 strategy.shares=[1000,1]",
         "strategy.shares = [1000,1] has numbers that differ by more than a factor 100: leave so slow a "
         "device out. Try strategy.shares=measured."),
        ("strategy=data nodes=2 strategy.shares=[1000,1] training.global_batch_size=202",
         "strategy.shares = [1000,1] has numbers that differ by more than a factor 100: leave so slow a "
         "device out. Try strategy.shares=[1000,10] or strategy.shares=measured."),
        ("strategy=tensor gpus_per_node=2 strategy.shares=[3,1]",
         "strategy.shares = [3,1] can't be used: tensor 2 has neither replicas nor pipeline stages, which "
         "shares divide. Try strategy.shares=null."),
        ("strategy=dataparallel gpus_per_node=2 strategy.shares=[3,1]",
         "strategy.shares = [3,1] can't be used: torch splits the batch of nn.DataParallel into equal parts. "
         "Try strategy.shares=null."),
        ("strategy=pipeline nodes=2 strategy.cuts=[3] strategy.shares=[3,1]",
         "strategy.shares = [3,1] can't be used: strategy.cuts already says which blocks each rank has. "
         "Try strategy.shares=null."),
        ("strategy=pipeline nodes=4 strategy.pipeline=2 strategy.replicate=2 strategy.shares=[3,1]",
         "strategy.shares = [3,1] can't be used: they could be those of 2 replicas or of 2 ranks of a "
         "pipeline. Try strategy.shares=null."),
        ("strategy=expert model=moe_tiny nodes=2 strategy.shares=measured",
         "strategy.shares = measured can't be used: with strategy.expert = 2 it is not proven. "
         "Try strategy.shares=null."),
        ("strategy=data nodes=2 task=infer strategy.shares=[3,1]",
         "strategy.shares = [3,1] can't be used: only a training is split by shares, not task=infer. "
         "Try strategy.shares=null."),
        ("strategy=data nodes=2 strategy.shares=[3,1] training.microbatch_size=1",
         "training.microbatch_size = 1 is split by strategy.shares = [3,1] into 8 x (1 + 1) (microbatches x "
         "samples of each replica), which takes 2.00 times as long as an exact split. "
         "Try training.microbatch_size=2."),
        ("strategy=data nodes=2 strategy.shares=[5,1] training.global_batch_size=2",
         "training.global_batch_size = 2 is split by strategy.shares = [5,1] into 1 x (1 + 1) (microbatches "
         "x samples of each replica), which takes 3.00 times as long as an exact split. "
         "Try training.global_batch_size=6."),
    ],
)  # fmt: skip
def test_shares_that_fit_nothing_are_refused(words: str, problem: str) -> None:
    assert _problems(*words.split()) == [problem]
    suggestion = problem.rpartition("Try ")[2].rstrip(".").split(" or ")[0].split()
    assert _problems(*words.split(), *suggestion) == []


def _problems(*words: str) -> list[str]:
    config, *_ = resolve(composed(*words))
    return [str(problem) for problem in find_problems(config)]


@pytest.mark.parametrize("extreme", [1e-308, 1e308])
def test_only_the_ratio_of_shares_matters(extreme: float) -> None:
    words = ("strategy=data", "nodes=2", f"strategy.shares=[{extreme},{extreme}]")
    assert _problems(*words) == []
    assert batch_shares([extreme, extreme / 2], Layout(replicate=2)) == [1.0, 0.5]


def test_many_replicas_are_split_quickly() -> None:
    shares: list[Any] = np.linspace(1, 90, 4096).tolist()
    parts = apportion(2**20, shares)
    assert sum(parts) == 2**20
    assert slowdown(parts, shares) < 1.1
