"""`sweep.json`: the keys that other commands read, and nothing half-written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_parallel.record.sweep_folder import (
    SkippedRun,
    Sweep,
    SweepRun,
    create,
    is_sweep_folder,
    read_sweep,
    write_sweep,
)

SWEEP = Sweep(
    command=("run", "-m", "nodes=1,2", "name=it's"),
    started="2026-11-21T22:01:00Z",
    parallelism=None,
    runs=(
        SweepRun(("nodes=1",), Path("/runs/data/a"), nodes=1, gpus_per_node=4, job_id="123_0"),
        SweepRun(("nodes=2",), Path("/runs/data/b"), nodes=2, gpus_per_node=4),
    ),
    skipped=(SkippedRun(("nodes=0",), ("nodes = 0 must be at least 1.",)),),
)


def test_the_manifest_has_the_keys_of_the_contract(tmp_path: Path) -> None:
    folder = tmp_path / "sweeps" / "one"
    create(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    write_sweep(folder, SWEEP)
    assert json.loads((folder / "sweep.json").read_text()) == {
        "command": ["run", "-m", "nodes=1,2", "name=it's"],
        "started": "2026-11-21T22:01:00Z",
        "parallelism": None,
        "runs": [
            {"overrides": ["nodes=1"], "run_dir": "/runs/data/a", "nodes": 1, "gpus_per_node": 4,
             "job_id": "123_0"},
            {"overrides": ["nodes=2"], "run_dir": "/runs/data/b", "nodes": 2, "gpus_per_node": 4,
             "job_id": None},
        ],
        "skipped": [{"overrides": ["nodes=0"], "problems": ["nodes = 0 must be at least 1."]}],
    }  # fmt: skip
    assert [path.name for path in folder.iterdir()] == ["sweep.json"]


def test_written_values_are_read_back(tmp_path: Path) -> None:
    write_sweep(tmp_path, SWEEP)
    assert read_sweep(tmp_path) == SWEEP


def test_a_folder_holds_one_sweep(tmp_path: Path) -> None:
    write_sweep(tmp_path, SWEEP)
    assert is_sweep_folder(tmp_path)
    with pytest.raises(FileExistsError, match="holds a sweep already"):
        create(tmp_path)


def test_a_folder_with_other_files_keeps_its_mode(tmp_path: Path) -> None:
    (empty := tmp_path / "empty").mkdir()
    (shared := tmp_path / "shared").mkdir()
    (shared / "notes.txt").write_text("mine")
    for folder in (empty, shared):
        folder.chmod(0o755)
        create(folder)
    assert [folder.stat().st_mode & 0o777 for folder in (empty, shared)] == [0o700, 0o755]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"command": [], "started": "", "parallelism": null}'])
def test_a_foreign_file_is_reported(text: str, tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(ValueError, match=r"sweep\.json can't be read: "):
        read_sweep(tmp_path)


def test_a_missing_sweep_is_no_foreign_one(tmp_path: Path) -> None:
    assert not is_sweep_folder(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_sweep(tmp_path)
