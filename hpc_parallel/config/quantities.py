"""Times as Slurm writes them, and times, sizes and numbers as people write them."""

from __future__ import annotations

import re

_MINUTES = {"s": 1 / 60, "m": 1.0, "min": 1.0, "h": 60.0, "d": 1440.0}
_GIGABYTES = {"m": 1 / 1024, "g": 1.0, "t": 1024.0}


def minutes_of(clock: str) -> int | None:
    """Convert sbatch's time formats (`90:00`, `1:30:00`, `2-12`, `1-06:30:00`) to minutes, rounded up."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", clock)
    if match is None:
        return None
    days, first, second, third = (int(part or 0) for part in match.groups())
    if match[1] is not None:  # days-hours[:minutes[:seconds]]
        return days * 1440 + first * 60 + second + (third > 0)
    if match[4] is not None:  # hours:minutes:seconds
        return first * 60 + second + (third > 0)
    return first + (second > 0)  # minutes[:seconds]


def same_quantity(key: str, value: str) -> float | None:
    """The number that `value` stands for, in the unit of `key`: `2h` for minutes, `64G`, `1e3`, `1_000`."""
    if key.endswith("time_minutes") and (minutes := minutes_of(value)):
        return minutes
    match = re.fullmatch(r"([\d_]*\.?\d+(?:e\d+)?)\s*([a-z]*)", value.strip().lower())
    if match is None:
        return None
    number, unit = float(match[1].replace("_", "")), match[2]
    if not unit:
        return number
    if key.endswith("time_minutes"):
        unit = unit if unit in _MINUTES else unit[:1]
        return number * _MINUTES[unit] if unit in _MINUTES else None
    if key.endswith("_gb") and unit.rstrip("ib") in _GIGABYTES:
        return number * _GIGABYTES[unit.rstrip("ib")]
    return None
