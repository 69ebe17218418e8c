"""A run and a sweep that version 0.1 left (tests/data/runs_of_07695be): shown, reported, resumed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpc_parallel.__main__ import main as command
from hpc_parallel.launch.prepare import prepare
from hpc_parallel.launch.resume import resumed
from hpc_parallel.record import owner
from hpc_parallel.run import main
from tests.composed import composed
from tests.unit.test_checkpoint_index import write

RECORDED = Path(__file__).resolve().parents[1] / "data" / "runs_of_07695be"
RUN = "runs/pipeline/20261126-162502-e5e92eac"
SWEEP = "runs/sweeps/one"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project's folder with the run of a pipeline, and the sweep of which another run is missing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["run"])
    shutil.copytree(RECORDED / "run", tmp_path / RUN)
    (tmp_path / RUN / "rendezvous").mkdir()
    (tmp_path / SWEEP).mkdir(parents=True)
    shutil.copy(RECORDED / "sweep.json", tmp_path / SWEEP)
    for file in (*(tmp_path / RUN).glob("*.*"), tmp_path / SWEEP / "sweep.json"):
        file.write_text(file.read_text().replace("/home/user/project", str(tmp_path)))
        file.chmod(0o600)
    holder = json.loads((tmp_path / RUN / "owner.json").read_text())
    changes = {"host": owner.this_process().host, "folder": (tmp_path / RUN).stat().st_ino}
    (tmp_path / RUN / "owner.json").write_text(json.dumps(holder | changes))
    for folder in (tmp_path / RUN, tmp_path / SWEEP):
        folder.chmod(0o700)
    return tmp_path


def test_a_run_of_an_older_version_is_shown_and_reported(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["status", RUN, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["state"], row["step"], row["steps"]) == ("completed", 3, 3)
    assert row["loss"] == pytest.approx(4.448, abs=1e-3)
    assert command(["report", RUN]) == 0
    page = (here / RUN / "report" / "report.md").read_text()
    assert "| pipeline 2 x 1 | completed | pipeline 2 | 8.98 | 906 | 304 | 4.448 | 0 | 0.00154 |" in page


def test_a_run_of_an_older_version_is_resumed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its command line gives the same value to every key that it had; keys that are newer have defaults."""
    write(here / RUN / "checkpoints", 3)
    line = [f"resume={RUN}", "training.steps=5"]
    assert main([*line, "dry_run=true"]) == 0
    assert str(here / RUN) in capsys.readouterr().out
    before = leaves(yaml.safe_load((here / RUN / "config.yaml").read_text()))
    words = resumed(line)
    now = leaves(prepare(composed(*words), overrides=words).values)
    changed = {key: now.get(key) for key in before.keys() | now.keys() if before.get(key) != now.get(key)}
    assert {key: changed[key] for key in before.keys() & changed.keys()} == {
        "training.steps": 5, "resume": str(here / RUN),
        "optimizer.warmup_steps": 0,  # that of the first start, a twentieth of 3 steps
    }  # fmt: skip


def leaves(values: Any, prefix: str = "") -> dict[str, Any]:
    """The dotted key and the value of each entry of nested tables."""
    if not isinstance(values, dict) or not values:
        return {prefix: values}
    return {
        key: leaf for name, value in values.items()
        for key, leaf in leaves(value, f"{prefix}.{name}" if prefix else name).items()
    }  # fmt: skip


def test_the_missing_run_of_an_older_sweep_is_started(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", f"sweep.resume={SWEEP}", "dry_run=true"]) == 0
    told = capsys.readouterr().out
    assert "# 0: strategy=data\n" in told
    assert "strategy=pipeline" not in told
    assert "# 1 run of 2 devices together" in told
