"""Which replica is accused of which weight, and that a checksum sees every bit."""

from __future__ import annotations

import pytest
import torch

from hpc_parallel.training.replicas import bit_sum, blame, first_difference


@pytest.mark.parametrize(
    ("rows", "ranks"),
    [
        ([(1, 5), (1, 5), (2, 6)], []),
        ([(1, 5), (2, 6), (1, 7), (2, 6)], [0, 2]),
        ([(1, 5), (2, 6), (1, 5), (2, 7)], [1, 3]),
    ],
)
def test_only_ranks_that_hold_the_same_are_compared(rows: list[tuple[int, int]], ranks: list[int]) -> None:
    assert first_difference(rows) == ranks


@pytest.mark.parametrize(
    ("b_by_rank", "culprit", "reference"),
    [("5 6", 1, 0), ("6 5 5", 0, 1), ("5 5 6 5", 2, 0), ("5 6 6 5", 1, 0)],
)
def test_the_minority_is_accused(b_by_rank: str, culprit: int, reference: int) -> None:
    """The ranks are 10, 20, ...; they agree on `a`, and what comes after `b` does not matter."""
    sums = {
        10 * (rank + 1): {"a": "1", "b": value, "c": f"{rank}"}
        for rank, value in enumerate(b_by_rank.split())
    }
    assert blame(sums) == (10 * (culprit + 1), 10 * (reference + 1), "b")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("count", "skipped"), [(8, 0), (7, 0), (8, 1)])
def test_any_flipped_bit_changes_the_sum(dtype: torch.dtype, count: int, skipped: int) -> None:
    weight = torch.linspace(-1, 1, count + skipped).to(dtype)[skipped:]
    before = bit_sum(weight).item()
    bits = weight.view(torch.uint8)
    for byte in range(len(bits)):
        for bit in range(8):
            bits[byte] ^= 1 << bit
            assert bit_sum(weight).item() != before, (byte, bit)
            bits[byte] ^= 1 << bit
    assert bit_sum(weight).item() == before
