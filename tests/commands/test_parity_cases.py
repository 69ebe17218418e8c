"""What `python -m hpc_parallel parity` would run, and how it compares: without training anything."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from hpc_parallel.commands import parity as command
from hpc_parallel.commands.parity import main, prove
from hpc_parallel.config.places import find_folder
from hpc_parallel.config.typed_config import choices_of
from hpc_parallel.problems import ConfigError
from hpc_parallel.proof import cases as rows_to_plan
from hpc_parallel.proof import parity_table
from hpc_parallel.proof.cases import ALL_RECIPES, Case, plan, without_refused
from hpc_parallel.proof.compare import ROUNDED, TOLERANCES, Difference, Verdict, compare
from hpc_parallel.proof.parity_table import Pace
from hpc_parallel.proof.rows import RECIPES, ROWS
from hpc_parallel.proof.task import full_arrays
from hpc_parallel.record.run_folder import RunFolder
from tests.marks import in_full


@cache
def pipelines() -> list[Case]:
    return plan(["strategy=pipeline"])[0]


def test_every_strategy_has_a_row() -> None:
    strategies = {file.stem for file in (find_folder("conf") / "strategy").glob("*.yaml")}
    assert {row.strategy for row in ROWS} == strategies - {"auto"}  # it chooses one of the others


def test_every_row_of_the_table_can_run() -> None:
    cases, notes = plan([])
    assert notes == []
    assert [case.problems for case in cases if case.problems] == []
    assert len(cases) == sum(len(row.nets) for row in ROWS)
    folders = [case.run.folder.path for case in cases]
    assert len(set(folders)) == len(cases)
    for case in cases:
        alone, run = case.alone.config, case.run.config
        assert case.alone.plan.layout.devices == 1
        assert (case.run.plan.layout.devices == 1) == (case.row.strategy == "single")  # no row is vacuous
        assert (alone.model, alone.data, alone.seed) == (run.model, run.data, run.seed)
        assert alone.training.global_batch_size == run.training.global_batch_size
    said = [case.run.config.strategy for case in cases]
    assert {strategy.schedule for strategy in said} == set(choices_of("strategy.schedule"))
    assert {strategy.context_attention for strategy in said} == set(choices_of("strategy.context_attention"))
    layouts = {case.layout for case in cases}
    assert {"pipeline 2, 1f1b", "context 2, gather", "shard 4, microbatch_size=1"} <= layouts
    # text on one device is one batch, so accumulation is proven; BatchNorm looks at a microbatch
    text = [case for case in cases if case.net in ("text", "moe")]
    assert {case.alone.plan.batch.microbatches for case in text} == {1}
    assert max(case.run.plan.batch.microbatches for case in text) > 1
    assert all(
        c.alone.plan.batch.microbatches == c.run.plan.batch.microbatches for c in cases if c not in text
    )
    assert len({case.alone.folder.path for case in cases}) <= 8


def test_each_recipe_of_the_docs_has_a_proof() -> None:
    cases, notes = plan([ALL_RECIPES])
    assert notes == []
    assert [case.problems for case in cases if case.problems] == []
    proofs = [f"{case.net}: {case.layout}" for case in cases]
    page = (Path(__file__).parents[2] / "docs/recipes.md").read_text().splitlines()
    assert [line for line in page if line.startswith("| ")][1:] == [
        f"| {recipe.name} | {recipe.publisher} | `{recipe.line}` | {proof} |"
        for recipe, proof in zip(RECIPES, proofs, strict=True)
    ]
    for recipe, case in zip(RECIPES, cases, strict=True):
        run, alone, words = case.run.config, case.alone.config, recipe.line.split()
        assert "training.compile=true" not in words or run.training.compile
        for key in ("precision", "weights", "fp8"):
            assert getattr(run.training, key) == getattr(alone.training, key)
            if key != "precision" or run.training.fp8 == "off":
                assert getattr(run.training, key) == value_of(f"training.{key}", words, DEFAULTS[key])
        assert run.training.fp8 == "off" or run.training.precision == "float64"  # sharp
        assert run.optimizer.state == alone.optimizer.state == value_of("optimizer.state", words, "float32")
        assert run.data.get("packing", False) == alone.data.get("packing", False) == (case.net == "packed")


DEFAULTS = {"precision": "float32", "weights": "float32", "fp8": "off"}


def value_of(key: str, words: list[str], default: str) -> str:
    return next((word.partition("=")[2] for word in words if word.startswith(f"{key}=")), default)


def test_a_strategy_takes_the_layout_of_the_command_line() -> None:
    cases, _ = plan(["strategy=pipeline", "nodes=4", "strategy.schedule=gpipe", "seed=7"])
    assert [(case.row.strategy, case.net) for case in cases] == [
        ("pipeline", "text"), ("pipeline", "digits"), ("pipeline", "unet"),
    ]  # fmt: skip
    assert str(cases[0].run.plan.layout) == "pipeline 4"
    assert cases[0].run.config.strategy.schedule == "gpipe"
    assert (cases[0].run.config.seed, cases[0].alone.config.seed) == (7, 7)
    assert "length of model.channels = 3" in str(cases[1].problems[0])  # too few for four stages


def test_float8_is_compared_with_microbatches_of_the_same_size() -> None:
    ((case,), _) = plan(["strategy=fsdp", "nodes=2", "model=tiny", "precision=float64",
                    "training.microbatch_size=2", "training.fp8=tensorwise"])  # fmt: skip
    assert (case.run.plan.batch.microbatches, case.alone.plan.batch.microbatches) == (4, 8)


def test_other_overrides_apply_to_both_sides() -> None:
    ((case,), _) = plan(["strategy=fsdp", "nodes=2", "model=tiny", "training.steps=3", "precision=float64",
                    "training.microbatch_size=2", "strategy.reshard=false"])  # fmt: skip
    for config in (case.run.config, case.alone.config):
        assert (config.model["layers"], config.model["dim"]) == (4, 128)  # as the user's model says
        assert (config.training.steps, config.training.precision) == (3, "float64")
    assert (case.run.plan.batch.microbatches, case.alone.plan.batch.microbatches) == (4, 1)
    assert (case.run.config.strategy.reshard, case.alone.config.strategy.name) == (False, "single")


def test_an_unsupported_row_is_left_out_with_its_reason() -> None:
    planned, _ = plan(["nodes=4", "model=tiny", "model.kv_heads=2"])
    cases = {case.row.strategy: case for case in planned}
    assert "single" not in cases  # it has no layout
    assert "strategy.tensor = 4 does not divide" in str(cases["tensor"].problems[0])
    assert "tile" not in cases  # of images
    assert str(cases["pipeline"].run.plan.layout) == "pipeline 4"


def test_a_key_of_one_network_leaves_the_others_out() -> None:
    cases, notes = plan(["strategy=data", "model.layers=3"])
    assert {case.net for case in cases} == {"text"}
    assert [note.partition(":")[0] for note in notes] == [
        "digits is left out", "cells is left out", "unet is left out",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("training.step=5", "there is no key training.step. Try training.steps=5."),
        ("strategy=pipelin nodez=2", "nodez=2: there is no key nodez. Try nodes=2."),
        ("strategy=fsdp precision=bfloat16", "Try training.precision=float32 or training.precision=float64."),
        ("strategy=fsdp launcher=slurm", "Try launcher.wait=true."),
        ("strategy=fsdp task=train", "Try task=proof."),
        ("strategy=tensor nodes=4 model.kv_heads=2", "strategy.tensor = 4 does not divide model.heads"),
        ("--config-dir nowhere strategy=fsdp", "--config-dir nowhere: this folder does not exist"),
        *in_full(
            [
                (
                    "strategy=fsdp training.precision=bfloat16",
                    "Try training.precision=float32 or training.precision=float64.",
                ),
                ("strategy=fsdp launcher=script", "Try launcher=local."),
                ("strategy=fsdp training.steps=0", "Try training.steps=1."),
                ("strategy=pipeline nodes=2,4", "Try run -m nodes=2,4, or one value: nodes=2."),
            ]
        ),
    ],
)
def test_a_wrong_configuration_starts_nothing(
    words: str, says: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    told = capsys.readouterr()
    assert says in told.err
    assert told.out == ""
    assert list(here.iterdir()) == []


@pytest.mark.full
def test_all_problems_are_printed_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        plan(["strategy=fsdp", "nodez=2", "training.precison=float64", "optimizer.name=sgd"])
    assert len(error.value.problems) == 3


EXACT = TOLERANCES["float64"]


def folder(path: Path, *, losses: list[float | None], **tensors: dict[str, np.ndarray]) -> RunFolder:
    made = RunFolder(path)
    made.proof.mkdir(parents=True)
    lines = [json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses, start=1)]
    made.metrics.write_text("\n".join(lines) + "\n")
    for name, arrays in tensors.items():
        np.savez(made.proof / f"{name.replace('_', '-')}.npz", **arrays)
    return made


def test_differences_are_relative_and_the_largest_is_named(tmp_path: Path) -> None:
    ones = {"a": np.ones(4), "b": np.ones((2, 2))}
    wanted = folder(tmp_path / "1", losses=[2.0, 4.0], gradients_0=ones, weights_0=ones)
    found = folder(
        tmp_path / "2", losses=[2.0, 4.1], gradients_0={"a": np.ones(4)},
        gradients_1={"b": np.full((2, 2), 3.0)}, weights_0=ones, weights_3={"a": np.array([1, 1, 1, 2.0])},
    )  # fmt: skip
    differences = compare(found, wanted, tolerance=EXACT)
    assert differences["losses"].value == pytest.approx(0.025)
    assert differences["losses"].where == "step 2"
    assert (differences["gradients"].value, differences["gradients"].where) == (2.0, "b")
    assert (differences["weights"].value, differences["weights"].where) == (0.5, "a")  # rank 3's copy


@pytest.mark.parametrize(
    "other",
    [
        {"a": np.array([1.0, np.nan])},
        {"a": np.array([1.0, np.inf])},
        {"a": np.ones(3)},
        {"b": np.ones(2)},
        {"a": np.ones(2), "b": np.ones(2)},
    ],
)
def test_incomparable_tensors_differ_infinitely(tmp_path: Path, other: dict[str, np.ndarray]) -> None:
    ones = {"a": np.ones(2)}
    wanted = folder(tmp_path / "1", losses=[1.0], gradients_0=ones, weights_0=ones)
    found = folder(tmp_path / "2", losses=[None], gradients_0=other, weights_0=ones)
    differences = compare(found, wanted, tolerance=EXACT)
    assert differences["gradients"].value == differences["losses"].value == math.inf
    assert differences["weights"].value == 0.0
    assert compare(wanted, found, tolerance=EXACT)["gradients"].value == math.inf


def test_noise_in_place_of_a_zero_gradient_is_no_difference(tmp_path: Path) -> None:
    """Adam divides the noise by its own size, so the weight differs too."""
    matrix = np.ones((4, 4))
    wanted, found = (
        folder(
            tmp_path / name, losses=[1.0], gradients_0={"key.bias": np.full(4, noise), "matrix": matrix},
            weights_0={"key.bias": np.full(4, 1e8 * noise), "matrix": matrix},
        )
        for name, noise in (("1", 1e-17), ("2", -3e-17))
    )  # fmt: skip
    differences = compare(found, wanted, tolerance=EXACT)
    assert differences["gradients"].value == pytest.approx(8e-17 / 0.04)  # a hundredth of the model's norm, 4
    assert differences["weights"].value == 0.0
    wrong = folder(
        tmp_path / "3", losses=[1.0], gradients_0={"key.bias": np.full(4, 1e-3), "matrix": matrix},
        weights_0={"key.bias": np.zeros(4), "matrix": matrix},
    )  # fmt: skip
    assert compare(wrong, wanted, tolerance=EXACT)["gradients"].value == pytest.approx(2e-3 / 0.04)


def test_a_run_that_left_nothing_is_no_proof(tmp_path: Path) -> None:
    ones = {"a": np.ones(2)}
    wanted = folder(tmp_path / "1", losses=[1.0], gradients_0=ones, weights_0=ones)
    with pytest.raises(ValueError, match="left no weights"):
        compare(folder(tmp_path / "2", losses=[1.0], gradients_0=ones), wanted, tolerance=EXACT)
    with pytest.raises(ValueError, match="logged 2 steps and one device 1"):
        compare(
            folder(tmp_path / "3", losses=[1.0, 1.0], gradients_0=ones, weights_0=ones),
            wanted,
            tolerance=EXACT,
        )


BIGRAM = """
from torch import nn
from hpc_parallel.models.layered import LayeredModel

class Bigram(LayeredModel):
    def __init__(self, **shape):
        blocks = [nn.Linear(4, 4), nn.Linear(4, 4)]
        super().__init__(stem=nn.Embedding(256, 4), blocks=blocks, head=nn.Linear(4, 256))
"""


def test_rows_that_the_model_refuses_are_left_out_before_processes_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal is that of the job: nothing says how Bigram's layers are split, and it has no experts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    (tmp_path / "small.py").write_text(BIGRAM)
    words = ["model._target_=small.Bigram", "nodes=2"]
    asked = ("pipeline", "tensor", "context")
    some = [replace(row, nets=("text",)) for row in ROWS if row.strategy in asked]
    monkeypatch.setattr(rows_to_plan, "ROWS", some)
    cases = {case.row.strategy: case for case in without_refused(plan(words)[0], words)}
    assert cases["pipeline"].run is not None
    for strategy in ("tensor", "context"):
        assert (cases[strategy].run, cases[strategy].alone) == (None, None)
        assert any("Bigram" in str(problem) for problem in cases[strategy].problems)
    assert not (tmp_path / "runs").exists()


def test_the_pace_of_a_proof() -> None:
    """Two runs of 10 s and 12 s: 11 s for each of the rest."""
    cases = pipelines()
    seconds = iter([0.0, 10.0, 100.0, 112.0])
    pace = Pace(cases, clock=lambda: next(seconds))
    runs = len(cases) + len({case.alone.folder.path for case in cases})
    assert pace.figures() == []
    assert pace.plan() == f"{len(cases)} rows to run, {runs - len(cases)} more on one device to compare with"
    for _ in range(2):
        with pace.run():
            pass
    minutes, left_s = divmod(11 * (runs - 2), 60)
    assert pace.figures() == [f"about {minutes} min {left_s} s left", "11 s a run"]
    assert pace.total() == "2 runs in 22 s (11 s a run)"


def test_ctrl_c_keeps_the_rows_that_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cases, _ = plan(["strategy=fsdp", f"run_dir={tmp_path}"])
    verdicts = [Verdict("equal"), Verdict("left out", ["no"])]

    def judged(*_: object, **__: object) -> Verdict:
        if not verdicts:
            raise KeyboardInterrupt
        return verdicts.pop(0)

    monkeypatch.setattr(command, "judge", judged)
    assert prove(cases, [], precision="float32") == 1
    kept = json.loads((tmp_path / "parity.json").read_text())["rows"]
    assert [row["word"] for row in kept] == ["equal", "left out"]
    shown = capsys.readouterr().out
    assert f"ended by Ctrl-C: 2 of {len(cases)} rows are done and kept" in shown
    assert "2 rows in float32: 1 equal, 1 left out." in shown


def test_a_proof_keeps_bfloat16_without_rounding() -> None:
    weight = torch.tensor([1 / 3, -2.5e-30, 3e38], dtype=torch.bfloat16)
    kept = full_arrays({"weight": weight, "exact": weight.double()})
    assert kept["weight"].astype(np.float64).tolist() == kept["exact"].tolist() == weight.tolist()


@pytest.mark.parametrize(
    ("precision", "is_rounded", "bound"),
    [("float64", False, 1e-9), ("float64", True, 1e-5), ("float32", False, 1e-9)],
)
def test_a_row_has_the_bounds_that_judged_it(
    precision: str, is_rounded: bool, bound: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (case, *_), _ = plan(["strategy=fsdp", f"run_dir={tmp_path}", "training.precision=float64"])
    assert case.alone is not None
    case.alone.folder.proof.mkdir(parents=True)
    if is_rounded:
        (case.alone.folder.proof / ROUNDED).touch()
    differences = {"losses": Difference(1e-7, "step 1")}
    monkeypatch.setattr(command, "run_quietly", lambda run: None)
    monkeypatch.setattr(command, "compare", lambda *_, **__: differences)
    prove([case], [], precision=precision)  # of the table; the row has its own
    (row,) = json.loads((tmp_path / "parity.json").read_text())["rows"]
    assert (row["word"], row["bounds"]["losses"]) == ("equal" if is_rounded else "MISS", bound)


@pytest.mark.parametrize(("columns", "has_measures"), [(40, False), (80, True)])
def test_a_narrow_terminal_gets_fewer_columns(
    columns: int, has_measures: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parity_table, "WIDTH", columns)
    cases = pipelines()
    table = parity_table.Table(TOLERANCES["float32"], precision="float32")
    table.begin("3 rows to run")
    table.add(cases[0], Verdict("equal"))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    assert any("gradients" in line and "verdict" in line for line in lines) == has_measures
    assert any(line.startswith("pipeline") and line.rstrip().endswith("equal") for line in lines)
