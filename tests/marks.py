"""Marks of cases of a parametrised test."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def in_full(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Cases of a parametrised test that `make test` leaves to `make test-full`."""
    return [pytest.param(*case, marks=pytest.mark.full) for case in cases]
