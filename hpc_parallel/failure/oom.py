"""What ran out of memory: an allocator (where, bytes requested, bytes free), or the cgroup of a process."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from hpc_parallel.record.metrics_file import size

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = rf"([\d.]+) ({'|'.join(_UNITS)})"
# Messages of torch's CUDA allocator, its CPU allocator, and numpy.
_ASKED = re.compile(rf"(?:tried to|unable to) allocate {_SIZE}", re.IGNORECASE)
_FREE = re.compile(rf"of which {_SIZE} is free")
_OOM_KILL = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
_AVAILABLE = re.compile(r"^MemAvailable:\s+(\d+) kB", re.MULTILINE)


def describe(error: BaseException, *, where: str | None) -> tuple[str, dict[str, Any]]:
    """Return a line such as `out of memory in block 7 (asked 2.1 GiB, free 0.3 GiB)`, and its figures.

    `asked_bytes` and `free_bytes` are null if unknown. On a CPU, free is the host's available memory.
    """
    text = str(error)
    on_gpu = "cuda" in f"{type(error).__name__} {text}".lower()
    asked_bytes = _bytes(_ASKED, text)
    free_bytes = _bytes(_FREE, text) if on_gpu else _available_bytes()
    sizes = (("asked", asked_bytes), ("free", free_bytes))
    figures = [f"{name} {size(count)}" for name, count in sizes if count is not None]
    line = "out of memory" + (f" in {where}" if where else "")
    line += f" ({', '.join(figures)})" if figures else ""
    return line, {"where": where, "asked_bytes": asked_bytes, "free_bytes": free_bytes}


def cgroup_kills(root: Path = Path("/")) -> dict[str, int]:
    """The number of processes that the kernel has killed for lack of memory, by cgroup.

    The cgroups are that of this process and all above it.

    Source: cgroups(7); `memory.events` of version 2, `memory.oom_control` of version 1.
    """
    kills: dict[str, int] = {}
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, place = line.split(":", 2)
            version_1 = "memory" in controllers.split(",")
            if not version_1 and controllers:
                continue
            mount = root / "sys/fs/cgroup" / ("memory" if version_1 else "")
            for path in (PurePosixPath(place), *PurePosixPath(place).parents):
                file = (
                    mount / str(path).lstrip("/") / ("memory.oom_control" if version_1 else "memory.events")
                )
                with suppress(OSError):
                    if match := _OOM_KILL.search(file.read_text()):
                        kills[str(path)] = int(match[1])
    return kills


def killing_cgroup(before: Mapping[str, int], root: Path = Path("/")) -> str | None:
    """The innermost cgroup in which the kernel has killed a process since `before`; None without one."""
    after = cgroup_kills(root)
    return next((place for place, count in after.items() if count > before.get(place, 0)), None)


def _bytes(pattern: re.Pattern[str], text: str) -> int | None:
    """The size in a message, as rounded there: 2.10 GiB is not exact to the byte."""
    match = pattern.search(text)
    if match is None:
        return None
    units = {name.lower(): scale for name, scale in _UNITS.items()}
    return round(float(match[1].rstrip(".")) * units[match[2].lower()])


def _available_bytes() -> int | None:
    try:
        match = _AVAILABLE.search(Path("/proc/meminfo").read_text())
    except OSError:
        return None
    return int(match[1]) * 1024 if match else None
