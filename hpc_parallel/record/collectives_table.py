"""What `task=collectives` measured: as a short and a full table for people, and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from hpc_parallel.problems import printable
from hpc_parallel.record.metrics_file import size
from hpc_parallel.record.values import integer, number, table, text

COLUMNS = (
    "group", "ranks", "operation", "dtype", "size_bytes", "time_s", "spread", "rounds", "algbw_bytes_per_s",
    "busbw_bytes_per_s",
)  # fmt: skip
TEXTS, COUNTS, NUMBERS = ("group", "operation", "dtype"), ("ranks", "size_bytes", "rounds"), COLUMNS[5:]
NCCL_TESTS = ("count", "redop", "wrong")  # further columns, as nccl-tests has them
PREDICTED = "predicted_s"  # a further column, if the run had a machine profile
MOST_ROWS, MOST_WARNINGS, MOST_NAMES = 10_000, 100, 8
Rows = Sequence[Mapping[str, Any]]


def valid_rows(content: Any) -> list[dict[str, Any]]:
    """The rows of `collectives.json` that have all columns; anybody may have written the file."""
    rows = table(content).get("rows")
    tables = [table(row) for row in rows[:MOST_ROWS]] if isinstance(rows, list) else []
    return [row for row in tables if is_row(row)]


def warning_lines(content: Any) -> list[str]:
    """The warnings of `collectives.json`: what takes longer than a machine profile says."""
    warnings = table(content).get("warnings")
    texts = map(text, warnings[:MOST_WARNINGS]) if isinstance(warnings, list) else ()
    return [f"WARNING: {printable(line)}" for line in texts if line]


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
    columns = (*COLUMNS, *NCCL_TESTS, *([PREDICTED] if has_predictions(rows) else []))
    writer = csv.DictWriter(out, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def has_predictions(rows: Rows) -> bool:
    """Whether a machine profile predicted any of the times."""
    return any(number(row.get(PREDICTED)) is not None for row in rows)


def full_table(rows: Rows) -> str:
    """All rows, as nccl-tests prints them, under a heading for each group and operation."""
    lines: list[str] = []
    with_predictions = has_predictions(rows)
    for (group, operation, ranks), part in grouped(rows, "group", "operation", "ranks"):
        lines += [f"{operation}, {group}{_aliases(part[0])}: {ranks} ranks"]
        cells: list[tuple[str, ...]] = [
            ("size (B)", "count", "type", "redop", "time (us)", "spread", "algbw (GB/s)", "busbw (GB/s)",
             "#wrong", "predicted (us)")
        ]  # fmt: skip
        cells += [(*_full_cells(row), _predicted(row)) for row in part]
        if not with_predictions:
            cells = [line[:-1] for line in cells]
        lines += [*_aligned(cells), ""]
    return "\n".join(lines)


def short_table(rows: Rows) -> list[str]:
    """A line for each group, operation and type: the time of the smallest size, the largest bandwidth."""
    titles = ("ranks", "operation", "type", "smallest", "busbw at best", "at size", "predicted", "measured")
    cells: list[tuple[str, ...]] = [titles]
    with_predictions = has_predictions(rows)
    for (group, operation, dtype), part in grouped(rows, "group", "operation", "dtype"):
        best = max(part, key=lambda row: row["busbw_bytes_per_s"])
        rates = (f"{best['busbw_bytes_per_s'] / 1e9:.3f} GB/s", f"{best['size_bytes']} B")
        cells.append((
            f"{group}{_aliases(part[0])} ({part[0]['ranks']})", operation, dtype,
            f"{part[0]['time_s'] * 1e6:.1f} us", *(rates if best["size_bytes"] else ("", "")),
            *_compared(best),
        ))  # fmt: skip
    return _aligned(cells if with_predictions else [line[:-2] for line in cells])


def row_cells(row: Mapping[str, Any]) -> list[str]:
    """A row for the screen, the most important cells first; the cells of all rows have the same widths."""
    return [
        row["operation"].ljust(14), size(row["size_bytes"]).rjust(9),
        f"{row['time_s'] * 1e6:.1f} us".rjust(11), row["dtype"].ljust(8),
        f"{row['busbw_bytes_per_s'] / 1e9:.3f} GB/s".rjust(12), row["group"],
    ]  # fmt: skip


def _compared(row: Mapping[str, Any]) -> tuple[str, str]:
    """The predicted and the measured time of a row; nothing without a prediction."""
    predicted = _predicted(row)
    return (f"{predicted} us", f"{row['time_s'] * 1e6:.1f} us") if predicted else ("", "")


def grouped(rows: Rows, *keys: str) -> list[tuple[tuple[str, ...], list[Mapping[str, Any]]]]:
    """The rows by the printable values of `keys`, in the order of their first rows."""
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(printable(row[key]) for key in keys), []).append(row)
    return list(groups.items())


def _full_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        str(row["size_bytes"]), _count(row.get("count")), printable(row["dtype"]),
        printable(text(row.get("redop")) or "-"), f"{row['time_s'] * 1e6:.1f}", f"{row['spread']:.0%}",
        f"{row['algbw_bytes_per_s'] / 1e9:.3f}", f"{row['busbw_bytes_per_s'] / 1e9:.3f}",
        _count(row.get("wrong")),
    )  # fmt: skip


def _count(value: Any) -> str:
    return "-" if integer(value) is None else str(value)


def _aliases(row: Mapping[str, Any]) -> str:
    """The other names of a group, as ` = axis shard`."""
    names = row.get("also")
    texts = map(text, names[:MOST_NAMES]) if isinstance(names, list) else ()
    return "".join(f" = {printable(name)}" for name in texts if name)


def _predicted(row: Mapping[str, Any]) -> str:
    time_s = number(row.get(PREDICTED))
    return "" if time_s is None else f"{time_s * 1e6:.1f}"


def _aligned(cells: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.rjust, line, widths)) for line in cells]
