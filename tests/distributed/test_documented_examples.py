"""The Python examples of the guides work as they stand there."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests import printed
from tests.parity import largest_difference, weight_difference
from tests.workers import Workers

ROOT = Path(__file__).resolve().parents[2]
MODELS, STRATEGIES = ROOT / "docs/models-and-data.md", ROOT / "docs/add-a-strategy.md"
SHORT = ("training.steps=3", "training.log_every=1", "training.validation_samples=16")
FILE = re.compile(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", re.DOTALL)


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """A user's folder with the files of the guide, as they stand there."""
    files = dict(FILE.findall(MODELS.read_text()))
    assert len(files["mymodel.py"].splitlines()) <= 35
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.full  # the command with a folder and a model: test_rerun.py; the pipeline: below
def test_a_model_of_the_users_own_trains_as_a_pipeline(example: Path) -> None:
    words = ("--config-dir", "site", "model=mine", "strategy=pipeline", "nodes=2", "launcher=local")
    small = (*SHORT, "data.max_bytes=200000", "run_dir=run")
    printed("-m", "hpc_parallel.run", *words, *small, cwd=example)
    losses = [json.loads(line)["loss"] for line in (example / "run/metrics.jsonl").read_text().splitlines()]
    assert losses[2] < losses[0]


def test_data_of_the_users_own_follows_one_device(
    example: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(example)
    workers.run(2, find_modules_in, str(example))
    words = (
        f"hydra.searchpath=[file://{example / 'site'}]", "data=sums", "model.layers=1", "model.dim=64",
        *SHORT,
    )  # fmt: skip
    alone = workers.train(*words, "strategy=single")
    split = workers.train(*words, "strategy=data", "nodes=2")
    assert alone.losses[-1] < alone.losses[0]
    assert largest_difference(split.losses, alone.losses) < 1e-5


def find_modules_in(folder: str) -> None:
    """On a rank; `sys.path.append` itself would reach it with a copy of the list."""
    sys.path.append(folder)


def test_it_follows_one_device_under_every_strategy(
    example: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(example)
    workers.run(2, find_modules_in, str(example))
    words = (
        f"hydra.searchpath=[file://{example / 'site'}]", "model=mine",
        *SHORT, "training.global_batch_size=8", "data.max_bytes=200000", "data.sequence_length=32",
    )  # fmt: skip
    alone = workers.train(*words, "strategy=single")
    assert alone.losses[-1] < alone.losses[0]
    for strategy in ("data", "pipeline", "fsdp", "tensor"):
        split = workers.train(*words, f"strategy={strategy}", "nodes=2")
        assert largest_difference(split.losses, alone.losses) < 1e-5, strategy
        assert weight_difference(split, alone) < 1e-4, strategy


def test_the_strategy_that_is_shown_is_the_real_one() -> None:
    section = STRATEGIES.read_text().split("## Add a strategy")[1]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert code is not None
    assert code[1] in (ROOT / "hpc_parallel/strategies/replicate.py").read_text()
