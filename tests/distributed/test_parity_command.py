"""`python -m hpc_parallel parity` proves what is right, and sees what is broken on purpose."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.marks import in_full

ROOT = Path(__file__).parents[2]
QUICK = ("training.steps=3", "run_dir=proof")


def parity(
    *words: str, here: Path, source: Path = ROOT, limit_s: int = 600
) -> tuple[subprocess.CompletedProcess[str], Any]:
    """The command in `here`, with the package of `source`; and the rows that it kept."""
    done = subprocess.run(
        [sys.executable, "-m", "hpc_parallel", "parity", *words, *QUICK],
        cwd=here, env={**os.environ, "PYTHONPATH": str(source), "COLUMNS": "100"},
        capture_output=True, text=True, timeout=limit_s,
    )  # fmt: skip
    kept = here / "proof" / "parity.json"
    return done, json.loads(kept.read_text())["rows"] if kept.exists() else None


def test_strategies_are_proven_in_float64(tmp_path: Path) -> None:
    done, (row,) = parity(
        "strategy=hybrid",
        "nodes=2",
        "gpus_per_node=2",
        "strategy.microbatches=2",
        "precision=float64",
        here=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (row["word"], row["layout"], row["reasons"]) == ("equal", "pipeline 2 x tensor 2", [])
    values = {name: found["value"] for name, found in row["differences"].items()}
    assert set(values) == {"losses", "gradients", "weights"}
    assert all(0 <= value < 1e-9 for value in values.values())
    assert max(values.values()) > 0  # the sums do have another order
    assert "1 row in float64: 1 equal." in done.stdout
    assert "float64 keeps 53 bits" in done.stdout
    assert "<= 1e-09" in done.stdout
    norms = [
        json.loads(line)["grad_norm"]
        for line in next((tmp_path / "proof").glob("01-*/metrics.jsonl")).read_text().splitlines()
    ]
    assert min(norms) > 0.5  # clipping is at work


@pytest.mark.full
def test_images_are_proven_with_their_running_statistics(tmp_path: Path) -> None:
    done, rows = parity("strategy=tile", "nodes=2", here=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(row["net"], row["word"]) for row in rows] == [
        ("digits", "equal"), ("cells", "equal"), ("unet", "equal"),
    ]  # fmt: skip
    import numpy as np

    with np.load(tmp_path / "proof/01-tile-digits/proof/weights-0.npz") as held:
        assert "blocks.0.norm.running_var" in held.files


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_all_recipes_are_proven_in_float64(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    done, rows = parity("recipes=true", "precision=float64", here=tmp_path, limit_s=3600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {row["word"] for row in rows} == {"equal"}


BREAKS = {
    "a halo's gradient": (
        "halo.py", "total[..., *region] += piece", "total[..., *region] = piece",
        ("strategy=tile", "nodes=2", "model=segmenter"), "gradients",
    ),
    "a gradient's scale": (
        "tile/split_image.py", "lambda gradient: gradient * tiles.tiles", "lambda gradient: gradient",
        ("strategy=tile", "nodes=2", "model=segmenter"), "gradients",
    ),
    "the order of stages": (
        "stages.py", "options=options, between=between)", "options=options, between=between)[::-1]",
        ("strategy=pipeline", "nodes=2", "model=tiny"), "losses",
    ),
}  # fmt: skip


def test_what_the_next_test_breaks_stands_once() -> None:
    """The next test runs in the full tier only, and would be found stale late."""
    for file, line, *_ in BREAKS.values():
        assert (ROOT / "hpc_parallel/strategies" / file).read_text().count(line) == 1


@pytest.mark.parametrize(
    "what", in_full([("the order of stages",), ("a halo's gradient",), ("a gradient's scale",)])
)
def test_a_broken_technique_is_seen(what: str, tmp_path: Path) -> None:
    file, line, broken, words, measure = BREAKS[what]
    for folder in ("conf", "hpc_parallel"):
        shutil.copytree(
            ROOT / folder, tmp_path / "copy" / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    place = tmp_path / "copy/hpc_parallel/strategies" / file
    place.write_text(place.read_text().replace(line, broken))
    data = () if "model=tiny" in words else ("data=cells", "data.samples=64")
    done, (row,) = parity(*words, *data, here=tmp_path, source=tmp_path / "copy")
    assert done.returncode == 1, done.stdout + done.stderr
    assert row["word"] == "MISS"
    assert row["differences"][measure]["value"] > 1e-3
    assert "1 row in float32: 1 MISS." in done.stdout
    assert any(reason.startswith(f"{measure}: ") for reason in row["reasons"])


FAILING = """
import torch

class Failing(torch.optim.SGD):
    def step(self, closure=None):
        raise RuntimeError("it has no step")
"""


def test_a_failed_run_names_the_cause(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    optimizer = ("optimizer=custom", "optimizer._target_=failing.Failing", "optimizer.learning_rate=0.1")
    done, (row,) = parity("strategy=data", "nodes=2", "model=tiny", *optimizer, here=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert (row["word"], row["differences"]) == ("failed", {})
    assert "it has no step" in row["reasons"][0]
    assert "Traceback" not in done.stdout + done.stderr


MODEL = """
import torch
from torch import nn
from torch.nn import functional as F
from hpc_parallel.models.layered import LayeredModel

class Net(LayeredModel):
    def __init__(self):
        super().__init__(stem=nn.Embedding(256, 16), blocks=[nn.Linear(16, 16)], head=nn.Linear(16, 256))

    def loss(self, output, target):
        return F.cross_entropy(output.float().flatten(0, 1), target.flatten(), reduction="sum")

    def metrics(self, output, target):  # what is only logged changes no bound
        return {"largest": output.to(torch.float32).amax()}
"""


@pytest.mark.full
@pytest.mark.parametrize("loss_in_float32", [True, False])
def test_a_model_with_parts_in_float32_has_the_bounds_of_float32(
    loss_in_float32: bool, tmp_path: Path
) -> None:
    (tmp_path / "own_net.py").write_text(MODEL if loss_in_float32 else MODEL.replace(".float()", ""))
    (tmp_path / "site/model").mkdir(parents=True)
    (tmp_path / "site/model/net.yaml").write_text("_target_: own_net.Net\n")
    words = ("--config-dir", "site", "model=net", "strategy=data", "nodes=2", "precision=float64")
    done, (row,) = parity(*words, here=tmp_path)
    assert (done.returncode, row["word"]) == (0, "equal"), done.stdout + done.stderr
    assert (row["differences"]["losses"]["value"] > 1e-9) == loss_in_float32
    assert ["bounds are those of float32" in reason for reason in row["reasons"]] == [True] * loss_in_float32
