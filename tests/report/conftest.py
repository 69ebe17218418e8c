"""What tests of reports share."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def new(tmp_path: Path) -> Callable[[], Path]:
    """Folders that are gathered in this order."""
    numbers = itertools.count()
    return lambda: tmp_path / "runs" / f"{next(numbers):03}"
