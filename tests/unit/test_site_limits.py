"""More nodes or memory than a partition has: a warning before the submission, and never a refusal."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hpc_parallel.config import site_limits
from hpc_parallel.config.site_limits import limits
from hpc_parallel.run import main

# As sinfo -o "%P|%D|%m": one line for each kind of node, a star at the default partition.
SINFO = "main*|3|256000\nmain*|1|512000+\nbig|16|1024000\nunset|2|1\nan error\n"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    sinfo(tmp_path, f"printf '%s' '{SINFO}'")
    site_limits._sinfo.cache_clear()
    return tmp_path


def sinfo(folder: Path, script: str) -> None:
    (folder / "sinfo").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "sinfo").chmod(0o755)


def warnings(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The warnings that a dry run prints to stderr."""
    overrides = ("strategy=data", "dry_run=true", "launcher.snapshot=false", *words)
    assert main([*overrides, "training.global_batch_size=720720"]) == 0
    lines = capsys.readouterr().err.splitlines(keepends=True)
    return "".join(line for line in lines if line.startswith("warning"))


@pytest.mark.parametrize(
    ("partition", "expected"),
    [(None, (4, 512000)), ("main", (4, 512000)), ("big", (16, 1024000)), ("big,main", (16, 1024000)),
     ("hidden", (0, 0))],
)  # fmt: skip
def test_limits_of_a_partition(partition: str | None, expected: tuple[int, int]) -> None:
    assert limits(SINFO, partition=partition) == expected


@pytest.mark.parametrize(
    ("words", "warning"),
    [
        (("nodes=9",), "warning     nodes=9: the default partition has 4 nodes. Try nodes=4.\n"),
        (("nodes=9", "launcher.partition=big"), ""),
        (("nodes=9", "launcher.partition=hidden"), ""),
        (("nodes=4", "launcher.memory_gb=500"), ""),
        (("launcher.memory_gb=501",),
         "warning     launcher.memory_gb=501: the largest node of the default partition has 500.0 GB. "
         "Try launcher.memory_gb=500.\n"),
        (("launcher.memory_gb=64", "launcher.partition=unset"), ""),
    ],
)  # fmt: skip
def test_warnings(words: tuple[str, ...], warning: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert warnings(capsys, "launcher=script", *words) == warning


def test_a_run_here_asks_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    assert warnings(capsys, "launcher=local", "nodes=9") == ""


@pytest.mark.parametrize("script", ["exit 1", "exec sleep 60"])
def test_a_silent_controller_does_not_hold_the_submission(
    script: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site_limits, "_PATIENCE_S", 0.2)
    sinfo(here, script)
    began_s = time.monotonic()
    assert warnings(capsys, "launcher=script", "nodes=9") == ""
    assert time.monotonic() - began_s < 30
