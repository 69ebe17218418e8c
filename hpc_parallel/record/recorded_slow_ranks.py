"""Ranks that were slower than the others, from `rank_times.json`, which anybody may have written."""

from __future__ import annotations

from typing import Any

from hpc_parallel.problems import printable
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import read_json
from hpc_parallel.record.values import integer, number, table, text

MOST_RANKS = 8
MOST_ACCUSATIONS = 64
MOST_LETTERS = 500  # of a host or a line


def slow_lines(folder: RunFolder) -> list[str]:
    """One line for each rank that was slow when it was last timed, the slowest first."""
    slow = _list(folder, "slow") or []
    lines = [text(table(rank).get("line")) for rank in slow[:MOST_RANKS]]
    return [printable(line) for line in lines if line]


def accused_lines(folder: RunFolder) -> list[str]:
    """One line for each rank that was ever slow, with the steps."""
    return [
        printable(f"{record['line']}, from step {record['first_step']} to {record['last_step']}")
        for record in (accusations(folder) or [])[:MOST_RANKS]
    ]


def accusations(folder: RunFolder) -> list[dict[str, Any]] | None:
    """The ranks that were ever slow, in the form of `summary.json`; None if no rank was timed."""
    accused = _list(folder, "accused")
    if accused is None:
        return None
    records = [_record(table(value)) for value in accused[:MOST_ACCUSATIONS]]
    return [record for record in records if record is not None]


def _record(value: dict[str, Any]) -> dict[str, Any] | None:
    integers = {key: integer(value.get(key)) for key in ("rank", "first_step", "last_step")}
    texts = {key: text(value.get(key)) for key in ("host", "cause", "line")}
    if None in integers.values() or None in texts.values():
        return None
    numbers = {key: number(value.get(key)) for key in ("factor", "own_s", "median_s")}
    return {**integers, **{key: str(content)[:MOST_LETTERS] for key, content in texts.items()}, **numbers}


def _list(folder: RunFolder, key: str) -> list[Any] | None:
    """None if the file can't be read, or has no list of this name."""
    try:
        values = table(read_json(folder.rank_times)).get(key)
    except (OSError, ValueError):
        return None
    return values if isinstance(values, list) else None
