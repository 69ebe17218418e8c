"""The folder from which the tests of this folder start scripts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.scripts.loops import CLIENTS


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with the clients, and nothing else."""
    for client in CLIENTS.glob("*.py"):
        shutil.copy(client, tmp_path)
    return tmp_path
