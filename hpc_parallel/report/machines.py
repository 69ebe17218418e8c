"""What each run of `task=preflight` measured of its machines: devices, storage and links."""

from __future__ import annotations

from collections.abc import Sequence

from hpc_parallel.record.machine_check_table import machine_lines
from hpc_parallel.record.safe_read import read_json
from hpc_parallel.report.gather import Row

MOST_LINES = 40  # of a run


def machines(rows: Sequence[Row]) -> list[tuple[Row, list[str]]]:
    """The runs that measured their machines, with their lines."""
    measured = [(row, _lines(row)) for row in rows]
    return [(row, lines) for row, lines in measured if lines]


def _lines(row: Row) -> list[str]:
    try:
        content = read_json(row.run.folder.machine_check)
    except (OSError, ValueError):
        return []
    lines = machine_lines(content) if content is not None else []
    hidden = len(lines) - MOST_LINES
    return lines[:MOST_LINES] + [f"and {hidden} more"] * (hidden > 0)
