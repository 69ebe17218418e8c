"""float16 with a loss scale: the same losses, norms, weights and factors on every layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from hpc_parallel.record.checkpoint_index import complete
from tests.marks import in_full
from tests.parity import largest_difference, weight_difference
from tests.workers import Train, Trained, Workers

STEPS, HALF = 8, 4
# SGD and the norm show a wrong factor, which AdamW would hide. No step overflows from this factor by itself:
# the steps that do would depend on the layout, because partial sums of a gradient have other sizes.
COMMON = (
    f"training.steps={STEPS}", f"training.checkpoint_every={HALF}", "training.log_every=1",
    "training.validate_every=null", "training.measure_steps=0", "training.global_batch_size=8",
    "data.sequence_length=32", "data.max_bytes=200000", "model.layers=3", "model.dim=64",
    "model.ffn_dim=160", "optimizer=sgd", "optimizer.warmup_steps=2", "training.loss_scale=1024",
    "training.loss_scale_every=3",
)  # fmt: skip
HALF_PRECISION = "training.precision=float16"
# (words, the training pass of block 2 in which step 2 gets a NaN, the rank that gets it)
LAYOUTS = {
    "single": (("strategy=single",), 2, 0),
    "data 2": (("strategy=data", "nodes=2"), 2, 1),
    "pipeline 2": (("strategy=pipeline", "nodes=2", "strategy.microbatches=4"), 5, 1),
    "fsdp 2": (("strategy=fsdp", "nodes=2"), 2, 1),
    "tensor 2": (("strategy=tensor", "nodes=2"), 2, 1),
    "shard 2 x tensor 2": (("strategy=tensor", "nodes=4", "strategy.tensor=2", "strategy.shard=2"), 2, 3),
    "context 2": (("strategy=context", "nodes=2"), 2, 1),
    "server": (("strategy=parameter_server", "nodes=3"), 2, 2),
}  # fmt: skip
NEAR = 1e-3  # float16 has 11 bits, 5e-4
MIXTURE = ("model=moe_tiny", "model.balance=1.0", "model.ffn_dim=24")


def with_an_overflow(layout: str) -> tuple[str, ...]:
    """Step 2 is not finite."""
    words, at, victim = LAYOUTS[layout]
    harm = ("+model.harm=poison", f"+model.at={at}", f"+model.victim={victim}")
    model = ("model._target_=tests.models.Harmed", "strategy.verify=never")  # a comparison would count passes
    return (*COMMON, *words, HALF_PRECISION, *model, *harm)


def assert_near(run: Trained, reference: Trained, *, near: float = NEAR) -> None:
    lines = list(zip(run.lines, reference.lines[-len(run.lines) :], strict=True))
    finite = [(line, other) for line, other in lines if other["grad_norm"] is not None]
    assert len(finite) >= HALF
    for key, bound in (("loss", near), ("grad_norm", 2 * near)):
        pairs = ([line[key] for line, _ in finite], [other[key] for _, other in finite])
        assert largest_difference(*pairs) < bound, key
    assert weight_difference(run, reference) < near


def factor(folder: Path, *, step: int) -> tuple[float, float]:
    """The factor in the checkpoint of a step, and the finite steps since it changed."""
    (checkpoint,) = (each for each in complete(folder / "checkpoints") if each.step == step)
    state = {f"loss_scale/{name}": torch.zeros(()) for name in ("factor", "finite_steps")}
    dcp.load(state, storage_reader=dcp.FileSystemReader(checkpoint.path), no_dist=True)
    values = [value.item() for value in state.values()]
    return values[0], values[1]


@pytest.mark.parametrize(
    "layout", [*in_full((name,) for name in LAYOUTS if name not in ("single", "fsdp 2")), "fsdp 2"]
)
def test_float16_is_that_of_one_device(trained: Train, layout: str) -> None:
    """An overflow on one rank skips the step on all; the factor halves, and doubles after 3 finite steps."""
    single, split = (trained(*with_an_overflow(name)) for name in ("single", layout))
    for run in (single, split):
        assert [line["skipped_steps"] for line in run.lines] == [0, *[1] * (STEPS - 1)]
        keys = ("skipped_step", "loss_scale_before", "loss_scale")
        told = {line["step"]: [line[key] for key in keys] for line in run.lines if keys[0] in line}
        assert told == {2: [2, 1024, 512]}
        assert factor(run.folder, step=HALF) == (512, 2)
        assert factor(run.folder, step=STEPS) == (2048, 0)
    assert_near(split, single)
    in_float32 = trained(*COMMON, "strategy=single").lines[0]
    assert split.lines[0]["grad_norm"] == pytest.approx(in_float32["grad_norm"], rel=NEAR)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["single", "fsdp 2"])
def test_float16_is_near_float32(trained: Train, layout: str) -> None:
    assert_near(trained(*COMMON, HALF_PRECISION, *LAYOUTS[layout][0]), trained(*COMMON, "strategy=single"))


@pytest.mark.full
def test_threads_compute_in_float16_too(trained: Train) -> None:
    split = trained(*COMMON, HALF_PRECISION, "strategy=dataparallel", "gpus_per_node=2")
    assert_near(split, trained(*COMMON, HALF_PRECISION, "strategy=single"))


@pytest.mark.full
@pytest.mark.parametrize("layout", [("strategy=single",), ("strategy=expert", "nodes=2")], ids=str)
def test_the_balance_of_experts_is_scaled_too(trained: Train, layout: tuple[str, ...]) -> None:
    mixture = trained(*COMMON, *MIXTURE, HALF_PRECISION, *layout)
    assert_near(mixture, trained(*COMMON, *MIXTURE, "strategy=single"), near=1e-2)


@pytest.mark.full
@pytest.mark.parametrize(
    ("before", "after"), [("fsdp 2", "pipeline 2"), ("server", "data 2"), ("tensor 2", "server")]
)
def test_the_factor_goes_on_in_another_layout(
    workers: Workers, trained: Train, before: str, after: str
) -> None:
    wrote = trained(*with_an_overflow(before))
    (half,) = (each for each in complete(wrote.folder / "checkpoints") if each.step == HALF)
    resumed = workers.train(*COMMON, HALF_PRECISION, *LAYOUTS[after][0], resume_from=half.path)
    assert factor(resumed.folder, step=STEPS) == (2048, 0)
    assert_near(resumed, trained(*with_an_overflow("single")))


def test_another_factor_is_used_after_a_resume(workers: Workers, trained: Train) -> None:
    """From 256 at step 4, three finite steps double it once."""
    words = (*COMMON, HALF_PRECISION, "strategy=single")
    wrote = trained(*words)
    (half,) = (each for each in complete(wrote.folder / "checkpoints") if each.step == HALF)
    assert factor(wrote.folder, step=STEPS) == (4096, 2)
    resumed = workers.train(*words, "training.loss_scale=256", resume_from=half.path)
    assert factor(resumed.folder, step=STEPS) == (512, 1)


@pytest.mark.full
def test_a_float32_run_goes_on_in_float16(workers: Workers, trained: Train) -> None:
    wrote = trained(*COMMON, "strategy=single")
    (half,) = (each for each in complete(wrote.folder / "checkpoints") if each.step == HALF)
    words = (*COMMON, HALF_PRECISION, *LAYOUTS["fsdp 2"][0])
    assert_near(workers.train(*words, resume_from=half.path), wrote)
