"""Times, sizes and numbers as people write them."""

from __future__ import annotations

import re

from hpc_parallel.slurm.short_forms import minutes_of

_SPELLINGS = {  # seconds in a unit of time: spellings of the unit
    0.001: ("ms", "msec"),
    1.0: ("s", "sec", "secs", "second", "seconds"),
    60.0: ("m", "min", "mins", "minute", "minutes"),
    3600.0: ("h", "hr", "hrs", "hour", "hours"),
    86400.0: ("d", "day", "days"),
}
_SECONDS = {spelling: seconds for seconds, spellings in _SPELLINGS.items() for spelling in spellings}
_BYTES = {"": 1.0, "k": 2.0**10, "m": 2.0**20, "g": 2.0**30, "t": 2.0**40}
_COUNTS = {"k": 1e3, "m": 1e6}
_UNIT_OF_KEY = {"_minutes": 60.0, "_s": 1.0, "_mb": 2.0**20, "_gb": 2.0**30, "bytes": 1.0}  # seconds, bytes


def same_quantity(key: str, value: str) -> float | None:
    """Convert `value` (`2h`, `64G`, `1e3`, `10k`) to a number in the unit of `key`, or to None."""
    if key.endswith("time_minutes") and (minutes := minutes_of(value)):
        return minutes
    match = re.fullmatch(r"([\d_]*\.?\d+(?:e\d+)?)\s*([a-z]*)", value.strip().lower())
    if match is None:
        return None
    number, unit = float(match[1].replace("_", "")), match[2]
    if not unit:
        return number
    end = next((end for end in _UNIT_OF_KEY if key.endswith(end)), None)
    if end is None:
        return number * _COUNTS[unit] if unit in _COUNTS else None
    factor = _SECONDS.get(unit) if end in ("_minutes", "_s") else _BYTES.get(re.sub(r"i?b$", "", unit))
    return None if factor is None else number * factor / _UNIT_OF_KEY[end]
