"""What an allocator says when there is no memory left, in few words: where, how much, how little."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hpc_parallel.record.metrics_file import size

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = rf"([\d.]+) ({'|'.join(_UNITS)})"
# torch's CUDA allocator, its CPU allocator, numpy's
_ASKED = re.compile(rf"(?:tried to|unable to) allocate {_SIZE}", re.IGNORECASE)
_FREE = re.compile(rf"of which {_SIZE} is free")
_AVAILABLE = re.compile(r"^MemAvailable:\s+(\d+) kB", re.MULTILINE)


def describe(error: BaseException, *, where: str | None) -> tuple[str, dict[str, Any]]:
    """A line such as `out of memory in block 7 (asked 2.1 GiB, free 0.3 GiB)`, and its figures.

    `asked_bytes` and `free_bytes` are null where nobody knows them; of a CPU the host's memory is free.
    """
    words = str(error)
    on_gpu = "cuda" in f"{type(error).__name__} {words}".lower()
    asked = _bytes(_ASKED, words)
    free = _bytes(_FREE, words) if on_gpu else _available_bytes()
    figures = [
        f"{name} {size(count)}" for name, count in (("asked", asked), ("free", free)) if count is not None
    ]
    line = "out of memory" + (f" in {where}" if where else "")
    line += f" ({', '.join(figures)})" if figures else ""
    return line, {"where": where, "asked_bytes": asked, "free_bytes": free}


def _bytes(pattern: re.Pattern[str], words: str) -> int | None:
    """An allocator's own rounding is kept: 2.10 GiB are not to the byte."""
    found = pattern.search(words)
    if found is None:
        return None
    units = {name.lower(): scale for name, scale in _UNITS.items()}
    return round(float(found[1].rstrip(".")) * units[found[2].lower()])


def _available_bytes() -> int | None:
    """What this host could still give; None where it does not say."""
    try:
        found = _AVAILABLE.search(Path("/proc/meminfo").read_text())
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None
