"""`make affected`: which tests a change can reach."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import affected
from tests.affected import distances_to, nearest

RING = "hpc_parallel/strategies/context/ring.py"


def test_a_change_reaches_what_imports_it() -> None:
    distances = distances_to([RING])
    assert distances["tests.distributed.test_context"] == 1
    assert distances["hpc_parallel.strategies.assemble"] < distances["tests.distributed.test_parity"]
    assert not any(name.startswith(("tests.report", "hpc_parallel.report")) for name in distances)
    by_name = distances_to(["hpc_parallel/worker/generation.py", "hpc_parallel/script/script_rank.py"])
    assert {"tests.distributed.test_random_models", "tests.unit.test_rank_process"} <= by_name.keys()
    assert "*" not in distances


def test_a_file_that_nobody_imports_reaches_every_test_if_it_is_no_text() -> None:
    assert distances_to(["conf/config.yaml"])["*"] == 0
    assert "*" not in distances_to(["README.md", "docs/submit.md"])
    assert distances_to(["README.md"])["tests.unit.test_docs"] == 0


def test_a_test_is_reached_through_its_fixtures(request: pytest.FixtureRequest, workers: object) -> None:
    """This module imports nothing of a rank; the fixture `workers` does."""
    assert nearest(request.node, distances_to([RING])) is not None
    assert nearest(request.node, distances_to(["hpc_parallel/report/page.py"])) is None


def test_changed_files_are_those_of_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> None:
        identity = ("-c", "user.name=tests", "-c", "user.email=tests@localhost")
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True)

    for name in ("same.py", "changed.py"):
        (tmp_path / name).touch()
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message=first")
    (tmp_path / "changed.py").write_text("changed = True\n")
    (tmp_path / "new.py").touch()
    monkeypatch.setattr(affected, "ROOT", tmp_path)
    assert affected.changed_files("HEAD") == ["changed.py", "new.py"]
