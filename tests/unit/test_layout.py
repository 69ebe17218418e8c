"""Degrees and batches in closed form."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_parallel.layout.axes import AXES
from hpc_parallel.layout.batch_plan import plan_batch
from hpc_parallel.layout.layout import Layout, divisors
from hpc_parallel.slurm.short_forms import minutes_of

DEGREES = st.lists(st.integers(1, 3), min_size=len(AXES), max_size=len(AXES))


def layout_of(degrees: list[int]) -> Layout:
    return Layout(**dict(zip(AXES, degrees, strict=True)))


@given(DEGREES)
def test_ranks_count_through_the_axes_innermost_fastest(degrees: list[int]) -> None:
    layout = layout_of(degrees)
    places = list(itertools.product(*(range(degree) for degree in degrees)))
    assert layout.devices == len(places)
    assert [tuple(layout.coordinates(rank)[axis] for axis in AXES) for rank in range(len(places))] == places


@given(DEGREES)
def test_replicas_are_replicate_by_shard_by_expert(degrees: list[int]) -> None:
    layout = layout_of(degrees)
    assert layout.data == layout.replicate * layout.shard * layout.expert
    parts = [layout.replica(rank) for rank in range(layout.devices)]
    assert sorted(parts) == [
        part for part in range(layout.data) for _ in range(layout.devices // layout.data)
    ]
    for rank, part in enumerate(parts):
        places = layout.coordinates(rank)
        outer, expert = divmod(part, layout.expert)
        assert expert == places["expert"]
        assert divmod(outer, layout.shard) == (places["replicate"], places["shard"])


@given(DEGREES, st.sampled_from(AXES))
def test_minus_one_takes_the_remaining_devices(degrees: list[int], free: str) -> None:
    whole = layout_of(degrees)
    open_one = layout_of(degrees)
    marked = Layout(**{**open_one.degrees, free: -1})
    assert Layout.resolve(marked, devices=whole.devices) == whole


@pytest.mark.parametrize(
    ("degrees", "devices"),
    [
        ({"pipeline": -1, "tensor": -1}, 4),
        ({"pipeline": 3, "replicate": -1}, 4),
        ({"pipeline": 2}, 4),
        ({}, 2),
    ],
)
def test_degrees_that_do_not_multiply_are_refused(degrees: dict[str, int], devices: int) -> None:
    with pytest.raises(ValueError, match=r"both -1|multiply to"):
        Layout.resolve(Layout(**degrees), devices=devices)


@given(st.integers(1, 512), st.integers(1, 8), st.integers(1, 8), st.none() | st.integers(1, 64),
       st.none() | st.integers(1, 64))  # fmt: skip
def test_a_batch_splits_without_remainder_or_not_at_all(
    batch: int, pipeline: int, replicate: int, size: int | None, count: int | None
) -> None:
    layout = Layout(pipeline=pipeline, replicate=replicate)
    try:
        plan = plan_batch(batch, layout=layout, microbatch_size=size, microbatches=count)
    except ValueError:
        samples, remainder = divmod(batch, replicate)
        impossible = [remainder, size and samples % size, count and samples % count]
        assert any(impossible) or (size and count and size * count != samples)
        return
    assert plan.data * plan.microbatches * plan.microbatch_size == batch
    assert plan.data == replicate
    assert size in (None, plan.microbatch_size)
    assert count in (None, plan.microbatches)
    if size is None and count is None:
        samples, most = batch // replicate, 4 * pipeline if pipeline > 1 else 1
        assert plan.microbatches == max(d for d in range(1, most + 1) if samples % d == 0)


@given(st.integers(1, 5000))
def test_divisors_are_all_and_rising(number: int) -> None:
    assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]
    assert math.prod(divisors(number)) ** 2 == number ** len(divisors(number))


@pytest.mark.parametrize(
    ("clock", "minutes"),
    [("90", 90), ("90:00", 90), ("90:01", 91), ("1:00:00", 60), ("1:30:00", 90), ("0:00:30", 1),
     ("2-0", 2880),
     ("2-12", 3600), ("1-06:30", 1830), ("1-06:30:01", 1831), ("90m", None), ("", None), ("1-", None),
     ("1:2:3:4", None), ("infinite", None)],
)  # fmt: skip
def test_sbatch_clocks_in_minutes(clock: str, minutes: int | None) -> None:
    assert minutes_of(clock) == minutes


def test_a_layout_prints_its_used_axes() -> None:
    assert str(Layout()) == "one device"
    assert str(Layout(pipeline=2, tensor=4)) == "pipeline 2 x tensor 4"
