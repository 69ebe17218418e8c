"""A plain nn.Module with a loss equals one device on every layout that leaves it whole."""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_model

from hpc_parallel.__main__ import main as command
from tests.marks import in_full
from tests.parity import STEPS, assert_follows, largest_difference
from tests.plain_models import SharedNet
from tests.workers import Train, Workers, train_here

COMMON = (
    f"training.steps={STEPS}", "training.log_every=1", f"training.validate_every={STEPS}",
    "training.validation_samples=16", "training.checkpoint_every=null", "training.measure_steps=0",
    "training.global_batch_size=16", "training.precision=float64", "training.clip_norm=0.5",
    "optimizer.warmup_steps=3", "optimizer.learning_rate=0.01",
)  # fmt: skip
TABLE = ("data=dataset", "data.dataset._target_=tests.datasets.Table")
TEXT = ("data=text", "data.sequence_length=16", "data.max_bytes=100000")
MODELS = {"TableNet": TABLE, "synced": TABLE, "SharedNet": TEXT}
LAYOUTS = {
    "data 2, accumulating 2": "strategy=data nodes=2 training.microbatch_size=4",
    "fsdp 2": "strategy=fsdp nodes=2",
    "fsdp 2, compiled": "strategy=fsdp nodes=2 training.compile=true",
    "hsdp 2 x 2": "strategy=hsdp nodes=2 gpus_per_node=2 training.activation_checkpointing=full",
    "server": "strategy=parameter_server nodes=3",
    "dataparallel 2": "strategy=dataparallel gpus_per_node=2",
}
FIRST = [("synced", "data 2, accumulating 2"), ("TableNet", "fsdp 2"), ("SharedNet", "fsdp 2")]
CASES = [(model, layout) for model in MODELS for layout in LAYOUTS]


def words_of(model: str) -> tuple[str, ...]:
    return *COMMON, *MODELS.get(model, TEXT), "~model", f"+model={{_target_: tests.plain_models.{model}}}"


@pytest.mark.parametrize(("model", "layout"), [*FIRST, *in_full(case for case in CASES if case not in FIRST)])
def test_layout_follows_one_device(trained: Train, model: str, layout: str) -> None:
    """The comparison at the start passes too. BatchNorm's moments are of a microbatch."""
    size = 8 if "accumulating" in layout and model != "SharedNet" else 16
    words = words_of("TableNet" if model == "synced" else model)
    alone = trained("strategy=single", *words, f"training.microbatch_size={size}")
    split = trained(*words_of(model), *LAYOUTS[layout].split())
    assert_follows(split, alone, losses=1e-10, weights=1e-9)
    covered = {run.summary["statistics_samples"] for run in (alone, split)}
    assert covered == ({None} if model == "SharedNet" else {size})


MANY_TOKENS = (
    "data.sequence_length=128",
    "training.global_batch_size=128",
    "training.steps=3",
    "training.loss_scale=64",
)
ROUNDING = {"bfloat16": 2**-9, "float16": 2**-12}
HALVES = [("fsdp 2", "bfloat16"), ("fsdp 2", "float16")]


@pytest.mark.parametrize(
    ("layout", "precision"),
    [*HALVES, *in_full((name, precision) for name in LAYOUTS for precision in ROUNDING
                       if (name, precision) not in HALVES)],
)  # fmt: skip
def test_half_precision_is_near_float32(trained: Train, layout: str, precision: str) -> None:
    """SharedNet multiplies by a buffer, which stays float32, and the loss is above the largest float16."""
    words = (*words_of("SharedNet"), *MANY_TOKENS)
    alone = trained("strategy=single", *words, "training.precision=float32")
    split = trained(*words, *LAYOUTS[layout].split(), f"training.precision={precision}")
    assert largest_difference(split.losses, alone.losses) < ROUNDING[precision]


def said_in_training(run_folder: str) -> str:
    printed = io.StringIO()
    with redirect_stderr(printed):
        train_here(run_folder, {})
    return printed.getvalue()


BUFFER = "WARNING: the buffer blocks.0.{} is written in a step, and no checkpoint has it (persistent=False)"
ATTRIBUTE = "WARNING: the attribute blocks.0.{} changes between steps, and no checkpoint has it"
FIRST = ": a resume begins with its first value"


@pytest.mark.parametrize(
    ("model", "line", "names"),
    [
        ("Counting", BUFFER + FIRST, ("in_place", "replaced")),
        ("Remembering", f"{ATTRIBUTE}{FIRST}. If a step reads it, make it a buffer", ("count", "mean")),
    ],
)
def test_what_steps_write_and_no_checkpoint_keeps_is_named_once(
    model: str, line: str, names: Sequence[str], workers: Workers
) -> None:
    """Not a buffer that nothing writes, a cache of the first step, and what is computed from weights."""
    run = workers.prepare(*words_of(model), "strategy=single")
    (printed,) = workers.run(1, said_in_training, str(run.folder.path))
    assert printed.splitlines() == [line.format(name) for name in names]


def test_weights_are_exported_under_the_modules_own_names(workers: Workers, tmp_path: Path) -> None:
    """The module takes the file whole; and a training starts from it."""
    run = workers.train(
        *words_of("SharedNet"), *LAYOUTS["fsdp 2"].split(), f"training.checkpoint_every={STEPS}"
    )
    path = tmp_path / "own.safetensors"
    assert command(["export", str(run.folder), "--output", str(path), "--library-names"]) == 0
    module = SharedNet().double()
    load_model(module, path)  # strict: raises for a missing or another name
    values = module.state_dict()
    assert {name.removeprefix("blocks.0.") for name in run.weights} == set(values) - {
        "output.weight",
        "decay",
    }
    for name, weight in run.weights.items():
        assert torch.equal(values[name.removeprefix("blocks.0.")], weight)
    again = workers.train(
        *words_of("SharedNet"),
        "strategy=single",
        "training.steps=1",
        "optimizer.warmup_steps=0",
        f"weights={path}",
    )
    assert again.losses[0] < run.losses[0]
