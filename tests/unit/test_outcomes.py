"""What `make test` does with failures: those of processes are repeated alone, those of numbers never."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import outcomes

ROOT = Path(__file__).parents[2]
CONFTEST = "pytest_plugins = ['tests.outcomes']\n"
TESTS = """
import os, pathlib, pytest

pytestmark = pytest.mark.xdist_group("one")

@pytest.mark.processes
@pytest.mark.parametrize("mark", ["a@b"])
def test_flaky(mark):
    seen = pathlib.Path("seen")
    first = not seen.exists()
    seen.touch()
    assert not first, "the port was busy"

def test_proof():
    if "CRASH" in os.environ:
        raise ChildProcessError("rank 1 was ended by SIGSEGV")
    assert "FAIL" not in os.environ, "off by 0.1"
"""
AGAIN = ("--last-failed", "--last-failed-no-failures=none", "--again=1", "--target=test")
BESIDE = ("-p", "xdist", "--numprocesses=1", "--dist=loadgroup")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_all.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    processes\n    xdist_group(name)\n")
    return tmp_path


def run(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    fixed = {"PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-q", *words]
    return subprocess.run(
        command, cwd=folder, env=os.environ | fixed | variables, capture_output=True, text=True
    )


@pytest.mark.parametrize("beside", [(), BESIDE])
def test_a_failure_of_processes_is_repeated_and_told(folder: Path, beside: tuple[str, ...]) -> None:
    assert run(folder, "--cache-clear", *beside).returncode == 1
    again = run(folder, *AGAIN)
    assert again.returncode == 0, again.stdout
    *_, unstable, line = again.stdout.splitlines()
    assert unstable == "unstable: test_all.py::test_flaky[a@b]: AssertionError: the port was busy"
    assert line.startswith("make test ")
    assert ": 2 passed, 0 failed, 1 unstable, 0 skipped, " in line


def test_a_failure_of_numbers_is_not_repeated(folder: Path) -> None:
    assert run(folder, "--cache-clear", FAIL="").returncode == 1
    again = run(folder, *AGAIN)  # it would pass now
    assert again.returncode == 1
    assert (
        "not repeated, because a failure of these is no matter of time: test_all.py::test_proof"
        in again.stdout
    )
    assert ": 0 passed, 2 failed, 0 unstable, 0 skipped, " in again.stdout.splitlines()[-1]


def test_a_rank_that_a_signal_ended_gave_no_number(folder: Path) -> None:
    (folder / "seen").touch()
    assert run(folder, "--cache-clear", *BESIDE, CRASH="").returncode == 1
    again = run(folder, *AGAIN)
    assert again.returncode == 0, again.stdout
    error = "unstable: test_all.py::test_proof: ChildProcessError: rank 1 was ended by SIGSEGV"
    assert error in again.stdout.splitlines()


def test_nothing_is_repeated_after_a_green_session(folder: Path) -> None:
    (folder / "seen").touch()
    assert run(folder, "--cache-clear").returncode == 0
    again = run(folder, *AGAIN)
    assert again.returncode == 0, again.stdout
    assert ": 2 passed, 0 failed, 0 unstable, 0 skipped, " in again.stdout.splitlines()[-1]


def session(*failed: str, passed: int = 0, whole: bool = True, again: bool = False) -> dict[str, Any]:
    return {
        "whole": whole, "again": again, "seconds": 600.4, "counts": {"passed": passed, "failed": len(failed)},
        "errors": dict.fromkeys(failed, "no answer"), "not repeatable": [],
    }  # fmt: skip


def test_a_failure_that_stays_is_red() -> None:
    records = [session("a", "b", passed=7), session(passed=1), session("b", passed=1, again=True)]
    assert outcomes.lines(records, target="test", commit="1a2b3c") == [
        "unstable: a: no answer",
        "make test 1a2b3c: 9 passed, 1 failed, 1 unstable, 0 skipped, 1,801 s",
    ]


@pytest.mark.parametrize("records", [[], [session()], [session(), session("a", whole=False)]])
def test_a_session_that_ended_early_is_red(records: list[dict[str, Any]]) -> None:
    assert outcomes.reason_against(records, sessions=2) == "a session before this one did not run to its end"
    if len(records) == 2:
        (line,) = outcomes.lines(records, target="test", commit="1a2b3c")
        assert line.startswith("make test 1a2b3c: a session did not end, 0 passed, 1 failed, ")
