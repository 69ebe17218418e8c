"""What the installed torch is too old for. The job uses the same torch."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version


def too_old(needed: tuple[int, int]) -> str | None:
    """Returns the rule that is broken if torch is older than `needed`. None also if no torch is installed."""
    try:
        match = re.match(r"(\d+)\.(\d+)", version("torch"))
    except PackageNotFoundError:
        return None
    if match is None or (installed := (int(match[1]), int(match[2]))) >= needed:
        return None
    oldest, current = (".".join(map(str, release)) for release in (needed, installed))
    return f"needs torch {oldest} or newer, and torch {current} is installed here"
