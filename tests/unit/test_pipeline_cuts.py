"""Stages are as even as contiguous cuts can be, against all possible cuts."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpc_parallel.config.schema import StrategyConfig
from hpc_parallel.layout.stage_cuts import balance
from hpc_parallel.models.layered import PartCosts, PartFlops
from hpc_parallel.models.transformer import Transformer
from hpc_parallel.problems import ConfigError
from hpc_parallel.strategies.stages import divide, parameters


def heaviest(flops: PartFlops, cuts: list[range]) -> int:
    count = len(flops.blocks)
    ends = [flops.stem * (c.start == 0) + flops.head * (c.stop == count) for c in cuts]
    return max(sum(flops.blocks[i] for i in cut) + end for cut, end in zip(cuts, ends, strict=True))


@given(
    blocks=st.lists(st.integers(1, 50), min_size=1, max_size=9),
    stem=st.integers(0, 60),
    head=st.integers(0, 60),
    data=st.data(),
)
def test_no_other_cuts_are_more_even(blocks: list[int], stem: int, head: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(blocks)))
    flops = PartFlops(stem=stem, blocks=tuple(blocks), head=head)
    found = balance(flops, stages=stages)
    assert [i for cut in found for i in cut] == list(range(len(blocks)))
    assert all(len(cut) >= 1 for cut in found)
    every = (
        [range(a, b) for a, b in pairwise((0, *inner, len(blocks)))]
        for inner in combinations(range(1, len(blocks)), stages - 1)
    )
    assert heaviest(flops, found) == min(heaviest(flops, cuts) for cuts in every)


def test_a_heavy_head_gets_fewer_blocks() -> None:
    flops = PartFlops(stem=0, blocks=(10,) * 8, head=40)
    assert [len(cut) for cut in balance(flops, stages=2)] == [6, 2]


def test_more_stages_than_blocks_is_a_problem_of_the_configuration() -> None:
    with pytest.raises(ConfigError, match=r"strategy.pipeline = 3 .* 2 blocks.*Try strategy.pipeline=2"):
        balance(PartFlops(stem=1, blocks=(1, 1), head=1), stages=3)


def test_stages_are_balanced_by_the_chosen_cost() -> None:
    """An embedding is many weights and no work; the head is as many weights, and counts where it stands."""
    with torch.device("meta"):
        model = Transformer(layers=8, dim=32, heads=2, kv_heads=2, ffn_dim=64, vocab_size=900)
    block = 4 * 32 * 32 + 3 * 32 * 64 + 2 * 32
    assert parameters(model) == PartCosts(stem=900 * 32, blocks=(block,) * 8, head=900 * 32 + 32)
    for balanced, lengths in (("flops", [5, 3]), ("parameters", [4, 4])):
        options = StrategyConfig(balance=balanced)
        found = divide(model, stages=2, sample_shape=(16,), options=options)
        assert [len(stage) for stage in found] == lengths


def test_cuts_that_only_a_look_at_the_model_refutes() -> None:
    with torch.device("meta"):
        model = Transformer(layers=4, dim=32, heads=2, kv_heads=2, ffn_dim=64, vocab_size=64)
    shape = {"stages": 2, "sample_shape": (16,)}
    assert divide(model, options=StrategyConfig(cuts=[1]), **shape) == [range(1), range(1, 4)]
    with pytest.raises(ConfigError, match=r"strategy.cuts = \[4\] .* Try strategy.cuts=\[2\]"):
        divide(model, options=StrategyConfig(cuts=[4]), **shape)
