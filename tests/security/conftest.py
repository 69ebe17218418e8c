from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.security import users


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that every user can enter."""
    yield from users.open_folder()
