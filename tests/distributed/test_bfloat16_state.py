"""Weights and optimizer state in bfloat16: rounded by the same noise on every layout, saved and restored.

In float64, layouts differ by 1e-16 before the rounding, so each weight must be the same bfloat16 on all of
them: another noise for one element would move this weight to its neighbour.
"""

from __future__ import annotations

import pytest
import torch

from hpc_parallel.record.checkpoint_index import complete
from hpc_parallel.training.checkpoint import CheckpointReader
from hpc_parallel.training.restore import conversions
from tests.marks import in_full
from tests.parity import COMMON, SHARED, largest_difference
from tests.workers import Train, Workers

ROUNDED = ("training.weights=bfloat16", "optimizer.state=bfloat16")
TWO, FOUR, EIGHT = "nodes=2", "nodes=2 gpus_per_node=2", "nodes=2 gpus_per_node=4"
ZERO_BUBBLE = "strategy.schedule=interleaved_zero_bubble strategy.stages_per_rank=2"
QUICK = f"strategy=tensor {FOUR} strategy.tensor=2 strategy.shard=2"
LAYOUTS = [
    f"strategy=data {TWO} training.microbatch_size=2",
    "strategy=fsdp nodes=3 training.global_batch_size=18",  # slices of unequal size
    f"strategy=hsdp {FOUR}",
    f"strategy=tensor {TWO}",
    f"strategy=pipeline {TWO}",
    f"strategy=pipeline {TWO} {ZERO_BUBBLE}",
    f"strategy=pipeline {FOUR} strategy.pipeline=2 strategy.replicate=2 {ZERO_BUBBLE}",
    f"strategy=context {TWO}",
    f"strategy=context {FOUR} strategy.context=2 strategy.shard=2",
    f"strategy=expert {TWO} model=moe_tiny",
    f"strategy=expert {FOUR} strategy.expert=2 strategy.replicate=2 model=moe_tiny",
    f"strategy=fsdp {FOUR} strategy.expert=2 model=moe_tiny",
    f"strategy=expert {FOUR} strategy.expert=2 strategy.tensor=2 model=moe_tiny",
    f"strategy=expert {FOUR} strategy.expert=2 strategy.context=2 model=moe_tiny",
    f"strategy=hybrid {EIGHT} strategy.tensor=2",
]
SGD = "optimizer=sgd +optimizer.options.nesterov=true"


def words(layout: str) -> tuple[str, ...]:
    return (*COMMON, *ROUNDED, *layout.split())


def one_device(layout: str) -> tuple[str, ...]:
    shared = (word for word in layout.split() if word.startswith((*SHARED, "optimizer", "+optimizer")))
    return (*COMMON, *ROUNDED, "strategy=single", *shared)


@pytest.mark.parametrize(
    "layout",
    [QUICK, *in_full((layout,) for layout in (*LAYOUTS, f"{QUICK} {SGD}", f"strategy=fsdp {TWO} {SGD}"))],
)
def test_each_weight_is_the_same_bfloat16_as_on_one_device(trained: Train, layout: str) -> None:
    exact = "training.precision=float64"
    split, reference = trained(*words(layout), exact), trained(*one_device(layout), exact)
    assert largest_difference(split.losses, reference.losses) < 1e-10
    assert split.weights.keys() == reference.weights.keys()
    for name, weight in split.weights.items():
        assert torch.equal(weight, reference.weights[name])
        assert torch.equal(weight, weight.bfloat16().to(weight.dtype))


@pytest.mark.parametrize(
    "layout", [f"strategy=data {TWO}", *in_full((layout,) for layout in (QUICK, *LAYOUTS[1:]))]
)
def test_the_curve_in_bfloat16_is_that_of_one_device(trained: Train, layout: str) -> None:
    """The bound is that of tests/distributed/test_bfloat16.py, for the same reason."""
    half = "training.precision=bfloat16"
    split, reference = trained(*words(layout), half), trained(*one_device(layout), half)
    assert largest_difference(split.losses, reference.losses) < 2**-9
    assert {weight.dtype for weight in split.weights.values()} == {torch.bfloat16}
    assert split.summary["in_bfloat16"] == "weights and optimizer state"
    for state in split.summary["rank_state_bytes"]:
        assert state["optimizer"] >= 2 * state["parameters"] > 0


BFLOAT16, FLOAT64 = "optimizer.state=bfloat16", "optimizer.state=float32"


@pytest.mark.parametrize(
    ("before", "after"),
    [((BFLOAT16,), (BFLOAT16,)), *in_full([((BFLOAT16,), (FLOAT64,)), ((FLOAT64,), (BFLOAT16,))])],
)
def test_a_checkpoint_goes_on_in_another_layout_and_type(
    workers: Workers, before: tuple[str, ...], after: tuple[str, ...]
) -> None:
    common = (
        *COMMON, "training.precision=float64", "training.weights=bfloat16", "training.steps=4",
        "training.checkpoint_every=2", "training.validate_every=null", "training.measure_steps=0",
        "model.layers=2",
    )  # fmt: skip
    wrote = workers.train(*common, *before, "strategy=fsdp", "nodes=2")
    (half,) = (each for each in complete(wrote.folder / "checkpoints") if each.step == 2)
    resumed = workers.train(*common, *after, "strategy=tensor", "nodes=2", resume_from=half.path)
    if before == after:
        assert largest_difference(resumed.losses, wrote.losses[2:]) < 1e-10
        assert all(torch.equal(resumed.weights[name], weight) for name, weight in wrote.weights.items())
    newest = complete(resumed.folder / "checkpoints")[0]
    types = {
        entry.properties.dtype
        for name, entry in CheckpointReader(newest).entries.items()
        if name.startswith("optimizer/") and not name.endswith("/step")
    }
    wide = {"optimizer/stem.weight/exp_avg": torch.zeros(1, dtype=torch.float64)}
    line = "optimizer: converted from bfloat16 of the checkpoint to float64"
    assert conversions(wide, reader=CheckpointReader(half)) == [line] * (before == (BFLOAT16,))
    assert types == {torch.bfloat16 if after == (BFLOAT16,) else torch.float64}
