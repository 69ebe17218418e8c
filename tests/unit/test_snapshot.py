"""The source kept with a run: what git knows and what is new, the state at submission, imported first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hpc_parallel.config.problems import ConfigError
from hpc_parallel.launch import snapshot
from hpc_parallel.launch.run_folder import RunFolder
from hpc_parallel.launch.snapshot import plan_snapshot


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A user's checkout: a tracked file that was changed since, a new one, an ignored one, a deleted one."""
    root = tmp_path / "mine"
    (root / "sub").mkdir(parents=True)
    for name in ("tracked_one.py", "sub/deep_one.py", "deleted.py"):
        (root / name).write_text("value = 1\n")
    (root / ".gitignore").write_text("*.bin\n")
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-qm", "first")
    (root / "tracked_one.py").write_text("value = 2\n")
    (root / "new_one.py").write_text("value = 3\n")
    (root / "weights.bin").write_bytes(b"0" * 100)
    (root / "deleted.py").unlink()
    return root


def copied(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_it_holds_what_git_tracks_and_does_not_ignore(checkout: Path, tmp_path: Path) -> None:
    plan_snapshot(tmp_path / "code", working_directory=checkout).take()
    assert copied(tmp_path / "code" / "mine") == {
        ".gitignore", "tracked_one.py", "sub/deep_one.py", "new_one.py",
    }  # fmt: skip
    assert (tmp_path / "code/mine/tracked_one.py").read_text() == "value = 2\n"


def test_processes_import_the_copy_and_not_what_was_edited_since(checkout: Path, tmp_path: Path) -> None:
    kept = plan_snapshot(tmp_path / "code", working_directory=checkout / "sub")
    kept.take()
    (checkout / "sub" / "deep_one.py").write_text("value = 99\n")
    done = subprocess.run(
        [sys.executable, "-c", "import deep_one, hpc_parallel; print(deep_one.value, hpc_parallel.__file__)"],
        cwd=checkout / "sub", env=kept.variables({}), capture_output=True, text=True, check=True,
    )  # fmt: skip
    value, package = done.stdout.split()
    assert value == "1"
    assert Path(package).is_relative_to(tmp_path / "code")


def test_planning_writes_nothing(checkout: Path, tmp_path: Path) -> None:
    plan_snapshot(tmp_path / "code", working_directory=checkout)
    assert not (tmp_path / "code").exists()


def test_more_than_source_is_refused(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "MOST_BYTES", 1000)
    with pytest.raises(ConfigError, match=r"launcher.snapshot = true .* Try launcher.snapshot=false"):
        plan_snapshot(tmp_path / "code", working_directory=checkout)


def test_outside_a_checkout_only_the_package_is_kept(tmp_path: Path) -> None:
    kept = plan_snapshot(tmp_path / "code", working_directory=tmp_path)
    (root,) = kept.copies
    assert (root / "hpc_parallel").is_dir()
    assert kept.import_path[1] == tmp_path


def test_earlier_runs_are_left_out(checkout: Path, tmp_path: Path) -> None:
    """A checkout that does not ignore runs/: each run would hold all before it."""
    for number in (1, 2):
        run = RunFolder(checkout / "runs" / "mine" / str(number))
        run.create()
        run.config.write_text("nodes: 1\n")
        plan_snapshot(run.code, working_directory=checkout).take()
    assert (checkout / "runs/mine/2/code/mine/new_one.py").is_file()
    assert not (checkout / "runs/mine/2/code/mine/runs").exists()


def test_submodules_are_source_too(checkout: Path, tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "inner_one.py").write_text("value = 5\n")
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "inner")):
        git(inner, *words)
    git(checkout, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(inner), "vendored")
    plan_snapshot(tmp_path / "code", working_directory=checkout).take()
    assert (tmp_path / "code/mine/vendored/inner_one.py").is_file()
