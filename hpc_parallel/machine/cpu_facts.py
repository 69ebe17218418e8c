"""The CPU and the memory of this host, as Linux reports them."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

CPUS, MEMORY = Path("/proc/cpuinfo"), Path("/proc/meminfo")


def cpu_facts(*, cpus: Path = CPUS, memory: Path = MEMORY) -> dict[str, Any]:
    """`model`, `cores` (hardware threads) of all CPUs, `total_bytes` and `available_bytes` of memory.

    A value that Linux does not report is None.
    """
    sizes = _values(memory)
    return {
        "model": _model(_values(cpus)),
        "cores": os.cpu_count(),
        "total_bytes": _bytes(sizes.get("MemTotal")),
        "available_bytes": _bytes(sizes.get("MemAvailable")),
    }


def _model(values: dict[str, str]) -> str:
    """The model name. ARM CPUs have none and get their architecture, implementer number and part number."""
    if name := values.get("model name"):
        return name
    numbers = [values[key] for key in ("CPU implementer", "CPU part") if key in values]
    return " ".join([platform.machine(), *numbers])


def _values(path: Path) -> dict[str, str]:
    """The first value of each name in lines `name : value`; empty if the file can't be read."""
    values: dict[str, str] = {}
    with suppress(OSError):
        for line in path.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            values.setdefault(name.strip(), value.strip())
    return values


def _bytes(value: str | None) -> int | None:
    """`16266796 kB` in bytes."""
    number, _, unit = (value or "").partition(" ")
    return int(number) * 1024 if number.isdecimal() and unit == "kB" else None
