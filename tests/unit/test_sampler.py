"""The order of samples: a bijection an epoch, the same for every layout."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hpc_parallel.data.sampler import Batches, sample_order

SEEDS = st.integers(0, 2**63 - 1)


@dataclass(frozen=True)
class Numbers:
    """Samples that are their own position."""

    count: int

    def __len__(self) -> int:
        return self.count

    def batch(self, positions: np.ndarray) -> tuple[Tensor, Tensor]:
        numbers = torch.from_numpy(positions)
        return numbers, -numbers


@given(seed=SEEDS, population=st.integers(1, 3000), epoch=st.integers(0, 10**9))
@settings(deadline=None)
def test_each_epoch_shows_every_sample_once(seed: int, population: int, epoch: int) -> None:
    indices = epoch * population + np.arange(population)
    order = sample_order(indices, seed=seed, population=population)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(population))


@given(seed=SEEDS, population=st.integers(1, 2**60), data=st.data())
@settings(deadline=None)
def test_one_index_needs_no_others(seed: int, population: int, data: st.DataObject) -> None:
    indices = data.draw(st.lists(st.integers(0, 2**62), min_size=1, max_size=20))
    together = sample_order(indices, seed=seed, population=population)
    assert ((together >= 0) & (together < population)).all()
    assert [int(sample_order([i], seed=seed, population=population)[0]) for i in indices] == together.tolist()


def test_epochs_and_seeds_give_orders_of_their_own() -> None:
    population = 1000
    orders = [
        sample_order(np.arange(population) + epoch * population, seed=seed, population=population)
        for seed in (0, 1)
        for epoch in (0, 1, 2)
    ]
    for i, one in enumerate([np.arange(population), *orders]):
        for other in orders[i:]:
            assert (one == other).sum() < 12  # 1 expected of two independent orders


def test_places_are_filled_evenly() -> None:
    """Each of 6 x 6 (index, position) pairs should occur in a sixth of 6,000 epochs; chi-square with 25
    degrees of freedom is below 60 with probability 0.9999."""
    population, epochs = 6, 6000
    order = sample_order(np.arange(population * epochs), seed=11, population=population).reshape(epochs, -1)
    counts = np.stack([np.bincount(order[:, i], minlength=population) for i in range(population)])
    expected = epochs / population
    assert ((counts - expected) ** 2 / expected).sum() < 60


def test_the_order_is_the_one_that_runs_were_made_with() -> None:
    order = sample_order(np.arange(10), seed=7, population=10)
    assert order.tolist() == ORDER_OF_SEED_7


ORDER_OF_SEED_7 = [9, 1, 2, 4, 3, 7, 6, 8, 5, 0]


@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
@pytest.mark.parametrize("seed", [None, 5])
def test_replicas_in_a_row_are_the_global_batch(replicas: int, seed: int | None) -> None:
    for step in (0, 3, 50):
        whole = Batches(samples=Numbers(100), global_batch_size=16, seed=seed).at(step)
        parts = [
            Batches(
                samples=Numbers(100), global_batch_size=16, seed=seed, replica=replica, replicas=replicas
            ).at(step)
            for replica in range(replicas)
        ]
        for i in (0, 1):
            assert torch.equal(torch.cat([part[i] for part in parts]), whole[i])


def test_replicas_share_each_microbatch_of_one_device() -> None:
    """BatchNorm sees the samples of a microbatch: they must not depend on how many replicas share it."""
    options = {"samples": Numbers(100), "global_batch_size": 16, "seed": 3, "microbatches": 4}
    whole = Batches(**options).at(1)[0].chunk(4)
    parts = [Batches(**options, replica=r, replicas=2).at(1)[0].chunk(4) for r in range(2)]
    for index, microbatch in enumerate(whole):
        assert torch.cat([part[index] for part in parts]).tolist() == microbatch.tolist()


def test_steps_walk_through_the_epoch() -> None:
    batches = Batches(samples=Numbers(48), global_batch_size=16, seed=5)
    seen = torch.cat([batches.at(step)[0] for step in range(3)])
    assert torch.equal(seen.sort().values, torch.arange(48))


@given(
    count=st.integers(1, 60), replicas=st.sampled_from([1, 2, 4]), microbatches=st.sampled_from([1, 2]),
    uneven=st.booleans(),
)  # fmt: skip
def test_the_counted_samples_of_all_replicas_are_each_of_the_first_once(
    count: int, replicas: int, microbatches: int, uneven: bool
) -> None:
    """The last batch is filled, and more replicas than samples are left for it."""
    size = 16 // microbatches // replicas
    sizes = (size + 1, size - 1) if uneven and replicas == 2 else None
    seen: list[int] = []
    for replica in range(replicas):
        batches = Batches(
            samples=Numbers(count), global_batch_size=16, seed=None, replica=replica, replicas=replicas,
            microbatches=microbatches, sizes=sizes,
        )  # fmt: skip
        for step in range(-(-count // 16)):
            pieces = batches.at(step)[0].chunk(microbatches)
            for counted, piece in zip(batches.counted(step, count=count), pieces, strict=True):
                seen += piece[:counted].tolist()
    assert sorted(seen) == list(range(count))


def test_a_server_has_no_sample_that_counts() -> None:
    batches = Batches(samples=Numbers(5), global_batch_size=8, seed=None, replica=None, microbatches=2)
    assert batches.counted(0, count=5) == [0, 0]


def test_an_impossible_population_is_refused() -> None:
    with pytest.raises(ValueError, match="population of 0"):
        sample_order([0], seed=0, population=0)
    with pytest.raises(ValueError, match="negative"):
        sample_order([-1], seed=0, population=5)
    with pytest.raises(ValueError, match="16 samples"):
        Batches(samples=Numbers(9), global_batch_size=16, seed=0, replicas=3)
