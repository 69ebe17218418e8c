from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.security import users


def pytest_itemcollected(item: pytest.Item) -> None:
    """These tests fork another user, a peer or a writer out of a process with threads."""
    item.add_marker("processes")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that every user can enter."""
    yield from users.open_folder()
