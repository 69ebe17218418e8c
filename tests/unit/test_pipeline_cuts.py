"""Stages are as even as contiguous cuts can be, against all possible cuts."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_parallel.config.problems import ConfigError
from hpc_parallel.models.layered import PartFlops
from hpc_parallel.strategies.pipeline import balance, stages_of


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


def test_stages_go_round_the_ranks() -> None:
    assert [stages_of(rank, degree=3, per_rank=2) for rank in range(3)] == [[0, 3], [1, 4], [2, 5]]
