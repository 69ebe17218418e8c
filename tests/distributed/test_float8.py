"""Training in float8: the curve of bfloat16 within its tolerance, and the same curve on layouts."""

from __future__ import annotations

import pytest

from tests.parity import COMMON, Alone, in_full, largest_difference
from tests.workers import Workers

HALF, TENSORWISE = "training.precision=bfloat16", "training.fp8=tensorwise"
LONG = ("training.steps=30", "training.validate_every=30")
TOLERANCE = 0.01
"""Of the loss over 30 steps. A float8 is off by up to 1/16, and at random, so that sums are nearer."""


@pytest.mark.parametrize("recipe", ["tensorwise", *in_full([("rowwise",)])])
def test_the_curve_is_that_of_bfloat16(alone: Alone, recipe: str) -> None:
    reference, trained = alone(HALF, *LONG), alone(HALF, *LONG, f"training.fp8={recipe}")
    assert reference.losses[-1] < 0.6 * reference.losses[0]
    assert 0 < largest_difference(trained.losses, reference.losses) < TOLERANCE
    means = [run.lines[-1]["validation_loss"] for run in (trained, reference)]
    assert abs(means[0] - means[1]) < TOLERANCE * means[1]


LAYOUTS = ["strategy=data", "strategy=fsdp", "strategy=pipeline"]


@pytest.mark.parametrize("layout", [LAYOUTS[1], *in_full([(LAYOUTS[0],), (LAYOUTS[2],)])])
def test_a_layout_follows_one_device(workers: Workers, alone: Alone, layout: str) -> None:
    """Each rank has scales of its own; as powers of two they leave the bound of bfloat16 as it is."""
    reference = alone(HALF, TENSORWISE)
    split = workers.train(*COMMON, HALF, TENSORWISE, layout, "nodes=2")
    assert largest_difference(split.losses, reference.losses) < 2**-9


@pytest.mark.full
def test_recomputation_changes_nothing(workers: Workers, alone: Alone) -> None:
    full = "training.activation_checkpointing=full"
    again = workers.train(*COMMON, HALF, TENSORWISE, full, "strategy=single")
    assert again.losses == alone(HALF, TENSORWISE).losses
