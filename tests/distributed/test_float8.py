"""Training in float8: the curve of bfloat16 within its tolerance, and the same curve on layouts."""

from __future__ import annotations

import pytest

from tests.marks import in_full
from tests.parity import COMMON, largest_difference
from tests.workers import Train

HALF, TENSORWISE = "training.precision=bfloat16", "training.fp8=tensorwise"
LONG = ("training.steps=30", "training.validate_every=30")
TOLERANCE = 0.01
"""Of the loss over 30 steps. A float8 is off by up to 1/16, and at random, so that sums are nearer."""


@pytest.mark.parametrize("recipe", ["tensorwise", *in_full([("rowwise",)])])
def test_the_curve_is_that_of_bfloat16(trained: Train, recipe: str) -> None:
    words = ("strategy=single", *COMMON, HALF, *LONG)
    reference, coarse = trained(*words), trained(*words, f"training.fp8={recipe}")
    assert reference.losses[-1] < 0.6 * reference.losses[0]
    assert 0 < largest_difference(coarse.losses, reference.losses) < TOLERANCE
    means = [run.lines[-1]["validation_loss"] for run in (coarse, reference)]
    assert abs(means[0] - means[1]) < TOLERANCE * means[1]


WORDS = (*COMMON, HALF, TENSORWISE)
LAYOUTS = ["strategy=data", "strategy=fsdp", "strategy=pipeline"]


@pytest.mark.parametrize("layout", [LAYOUTS[1], *in_full([(LAYOUTS[0],), (LAYOUTS[2],)])])
def test_a_layout_follows_one_device(trained: Train, layout: str) -> None:
    """Each rank has scales of its own; as powers of two they leave the bound of bfloat16 as it is."""
    reference, split = trained(*WORDS, "strategy=single"), trained(*WORDS, layout, "nodes=2")
    assert largest_difference(split.losses, reference.losses) < 2**-9


@pytest.mark.full
def test_recomputation_changes_nothing(trained: Train) -> None:
    full = "training.activation_checkpointing=full"
    assert trained(*WORDS, full, "strategy=single").losses == trained(*WORDS, "strategy=single").losses
