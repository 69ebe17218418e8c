"""Times as Slurm writes them."""

from __future__ import annotations

import re


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
