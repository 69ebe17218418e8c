"""What `task=collectives` measured, as a table for people and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpc_parallel.problems import printable
from hpc_parallel.record.values import integer, number, table, text

COLUMNS = (
    "group", "ranks", "operation", "dtype", "size_bytes", "time_s", "spread", "rounds", "algbw_bytes_per_s",
    "busbw_bytes_per_s",
)  # fmt: skip
MOST_ROWS = 10_000


def valid_rows(content: Any) -> list[dict[str, Any]]:
    """The rows of `collectives.json` that have all columns; the file may be of anybody's making."""
    rows = table(content).get("rows")
    tables = [table(row) for row in rows[:MOST_ROWS]] if isinstance(rows, list) else []
    return [row for row in tables if _is_complete(row)]


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows with a header line."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def show_collectives(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table as nccl-tests prints it, for each group and operation."""
    lines: list[str] = []
    title = None
    for row in rows:
        key = (row["group"], row["ranks"], row["operation"])
        if key != title:
            title = key
            lines += ["", f"{printable(row['operation'])}, {printable(row['group'])}: {row['ranks']} ranks"]
            lines.append(_line(("size (B)", "type", "time (us)", "spread", "algbw (GB/s)", "busbw (GB/s)")))
        lines.append(_line(_cells(row)))
    return lines


def _is_complete(row: Mapping[str, Any]) -> bool:
    texts = all(text(row.get(key)) is not None for key in ("group", "operation", "dtype"))
    counts = all(integer(row.get(key)) is not None for key in ("ranks", "size_bytes", "rounds"))
    return texts and counts and all(number(row.get(key)) is not None for key in COLUMNS[5:])


def _cells(row: Mapping[str, Any]) -> Iterator[str]:
    yield str(row["size_bytes"])
    yield printable(row["dtype"])
    yield f"{row['time_s'] * 1e6:.1f}"
    yield f"{row['spread']:.0%}"
    yield f"{row['algbw_bytes_per_s'] / 1e9:.3f}"
    yield f"{row['busbw_bytes_per_s'] / 1e9:.3f}"


def _line(cells: Sequence[str] | Iterator[str]) -> str:
    return "".join(cell.rjust(14) for cell in cells)
