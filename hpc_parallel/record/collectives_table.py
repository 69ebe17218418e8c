"""What `task=collectives` measured: as a short and a full table for people, and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from hpc_parallel.problems import printable
from hpc_parallel.record.values import integer, number, table, text

COLUMNS = (
    "group", "ranks", "operation", "dtype", "size_bytes", "time_s", "spread", "rounds", "algbw_bytes_per_s",
    "busbw_bytes_per_s",
)  # fmt: skip
TEXTS, COUNTS, NUMBERS = ("group", "operation", "dtype"), ("ranks", "size_bytes", "rounds"), COLUMNS[5:]
MOST_ROWS = 10_000
Rows = Sequence[Mapping[str, Any]]


def valid_rows(content: Any) -> list[dict[str, Any]]:
    """The rows of `collectives.json` that have all columns; anybody may have written the file."""
    rows = table(content).get("rows")
    tables = [table(row) for row in rows[:MOST_ROWS]] if isinstance(rows, list) else []
    return [row for row in tables if is_row(row)]


def is_row(row: Mapping[str, Any]) -> bool:
    """Whether all columns are there, with the right types."""
    return (
        all(text(row.get(key)) is not None for key in TEXTS)
        and all(integer(row.get(key)) is not None for key in COUNTS)
        and all(number(row.get(key)) is not None for key in NUMBERS)
    )


def as_csv(rows: Rows) -> str:
    """The rows with a header line."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def full_table(rows: Rows) -> str:
    """All rows, as nccl-tests prints them, under a heading for each group and operation."""
    lines: list[str] = []
    for (group, operation, ranks), part in grouped(rows, "group", "operation", "ranks"):
        lines += [f"{operation}, {group}: {ranks} ranks"]
        cells: list[tuple[str, ...]] = [
            ("size (B)", "type", "time (us)", "spread", "algbw (GB/s)", "busbw (GB/s)")
        ]
        cells += [_full_cells(row) for row in part]
        lines += [*_aligned(cells), ""]
    return "\n".join(lines)


def short_table(rows: Rows) -> list[str]:
    """A line for each group, operation and type: the time of the smallest size, the largest bandwidth."""
    cells: list[tuple[str, ...]] = [("ranks", "operation", "type", "smallest", "busbw at best", "at size")]
    for (group, operation, dtype), part in grouped(rows, "group", "operation", "dtype"):
        best = max(part, key=lambda row: row["busbw_bytes_per_s"])
        rates = (f"{best['busbw_bytes_per_s'] / 1e9:.3f} GB/s", f"{best['size_bytes']} B")
        cells.append((
            f"{group} ({part[0]['ranks']})", operation, dtype, f"{part[0]['time_s'] * 1e6:.1f} us",
            *(rates if best["size_bytes"] else ("", "")),
        ))  # fmt: skip
    return _aligned(cells)


def grouped(rows: Rows, *keys: str) -> list[tuple[tuple[str, ...], list[Mapping[str, Any]]]]:
    """The rows by the printable values of `keys`, in the order of their first rows."""
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(printable(row[key]) for key in keys), []).append(row)
    return list(groups.items())


def _full_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        str(row["size_bytes"]), printable(row["dtype"]), f"{row['time_s'] * 1e6:.1f}", f"{row['spread']:.0%}",
        f"{row['algbw_bytes_per_s'] / 1e9:.3f}", f"{row['busbw_bytes_per_s'] / 1e9:.3f}",
    )  # fmt: skip


def _aligned(cells: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.rjust, line, widths)) for line in cells]
