"""A hang costs one test: what it started has ended, and the next test passes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from cluster import clusters, unavailable_reason

from tests.waiting import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.full]


def test_a_test_that_hangs_leaves_nothing(tmp_path: Path) -> None:
    if reason := unavailable_reason():
        pytest.skip(reason)
    before = {cluster.number for cluster in clusters()}
    command = [sys.executable, "-m", "pytest", "tests/slurm/hanging.py", f"--basetemp={tmp_path / 'inside'}"]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True,
        env=os.environ | {"STARTED": str(tmp_path / "started"), "PYTEST_ADDOPTS": "-p no:cacheprovider"},
    )  # fmt: skip
    assert "1 failed, 1 passed" in done.stdout.splitlines()[-1], done.stdout
    assert "Failed: Timeout (>3.0s) from pytest-timeout" in done.stdout
    created = json.loads((tmp_path / "started").read_text())
    assert len(created) >= 2 + 4 + 4 + 2 * 2  # ranks, agent and its ranks, daemons, tasks
    wait_for(lambda: not [pid for pid, time in created.items() if lives(int(pid), time)])
    assert {cluster.number for cluster in clusters()} == before


def lives(pid: int, created: float) -> bool:
    try:
        process = psutil.Process(pid)
        return process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
