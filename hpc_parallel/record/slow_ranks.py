"""Ranks that were slower than the others, from `rank_times.json`, which anybody may have written."""

from __future__ import annotations

from hpc_parallel.problems import printable
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import read_json
from hpc_parallel.record.values import table, text

MOST_RANKS = 8


def slow_lines(folder: RunFolder) -> list[str]:
    """One line for each slow rank, the slowest first; empty if there is none or the file can't be read."""
    try:
        slow = table(read_json(folder.rank_times)).get("slow")
    except (OSError, ValueError):
        return []
    lines = [text(table(rank).get("line")) for rank in slow[:MOST_RANKS]] if isinstance(slow, list) else []
    return [printable(line) for line in lines if line]
