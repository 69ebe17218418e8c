"""What `task=collectives` measured: `collectives.json`, its tables for people, and CSV.

Anybody may have written the rows.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from hpc_parallel.problems import printable
from hpc_parallel.record.metrics_file import aligned, size
from hpc_parallel.record.run_folder import FolderRecord, RunFolder
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.record.typed import build, first

MOST_ROWS, MOST_WARNINGS, MOST_NAMES = 10_000, 100, 8
PREDICTED = "predicted_s"  # a key of the rows if the run had a machine profile
COLUMNS = (
    "group", "ranks", "operation", "dtype", "size_bytes", "time_s", "spread", "rounds", "algbw_bytes_per_s",
    "busbw_bytes_per_s",
)  # fmt: skip
NCCL_TESTS = ("count", "redop", "wrong")  # further columns, as nccl-tests has them


@dataclass(frozen=True, kw_only=True)
class CollectiveRow:
    """One collective over one group of ranks. Bandwidths are those of nccl-tests (PERFORMANCE.md)."""

    group: str
    also: Annotated[tuple[str, ...], first(MOST_NAMES)] = ()  # other names of the group
    ranks: int
    operation: str
    dtype: str
    size_bytes: int
    count: int | None = None  # elements of one rank; `count`, `redop` and `wrong` are nccl-tests' columns
    redop: str | None = None  # `sum` or `none`
    wrong: int | None = None  # number of wrong values
    time_s: float  # the median of all batches
    spread: float  # (largest - smallest) / median
    rounds: int
    algbw_bytes_per_s: float
    busbw_bytes_per_s: float
    predicted_s: float | None = None  # by a machine profile

    @property
    def measured(self) -> dict[str, Any]:
        """All keys but the prediction."""
        return {key: value for key, value in vars(self).items() if key != PREDICTED}


Rows = Sequence[CollectiveRow]


@dataclass(frozen=True)
class Collectives(FolderRecord):
    """The content of `collectives.json`. warnings: what takes longer than a machine profile predicts."""

    _file = "collectives"
    device: str | None = None
    backend: str | None = None
    sum: CollectiveRow | None = None  # the all-reduce that comes first
    rows: Annotated[tuple[CollectiveRow, ...], first(MOST_ROWS)] = ()
    left_out: str | None = None  # what was left out, with the reason
    warnings: Annotated[tuple[str, ...], first(MOST_WARNINGS)] = ()

    def write(self, folder: RunFolder, *, with_predictions: bool) -> None:
        rows = [vars(row) if with_predictions else row.measured for row in self.rows]
        write_json(folder.collectives, vars(self) | {"sum": self.sum and self.sum.measured, "rows": rows})


def rows_of(lines: Iterable[Any]) -> list[CollectiveRow]:
    """The rows in lines of `metrics.jsonl`; other lines are left out."""
    return [row for line in lines if (row := build(CollectiveRow, line)) is not None][:MOST_ROWS]


def as_csv(rows: Rows) -> str:
    out = io.StringIO()
    columns = (*COLUMNS, *NCCL_TESTS, *([PREDICTED] if has_predictions(rows) else []))
    writer = csv.DictWriter(out, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(vars, rows))
    return out.getvalue()


def has_predictions(rows: Rows) -> bool:
    return any(row.predicted_s is not None for row in rows)


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
        lines += [*aligned(cells), ""]
    return "\n".join(lines)


def short_table(rows: Rows) -> list[str]:
    """A line for each group, operation and type: the time of the smallest size, the largest bandwidth."""
    titles = ("ranks", "operation", "type", "smallest", "busbw at best", "at size", "predicted", "measured")
    cells: list[tuple[str, ...]] = [titles]
    with_predictions = has_predictions(rows)
    for (group, operation, dtype), part in grouped(rows, "group", "operation", "dtype"):
        best = max(part, key=lambda row: row.busbw_bytes_per_s)
        rates = (f"{best.busbw_bytes_per_s / 1e9:.3f} GB/s", f"{best.size_bytes} B")
        cells.append((
            f"{group}{_aliases(part[0])} ({part[0].ranks})", operation, dtype,
            f"{part[0].time_s * 1e6:.1f} us", *(rates if best.size_bytes else ("", "")),
            *_compared(best),
        ))  # fmt: skip
    return aligned(cells if with_predictions else [line[:-2] for line in cells])


def row_cells(row: CollectiveRow) -> list[str]:
    """A row for the screen, the most important cells first; the cells of all rows have the same widths."""
    return [
        row.operation.ljust(14), size(row.size_bytes).rjust(9),
        f"{row.time_s * 1e6:.1f} us".rjust(11), row.dtype.ljust(8),
        f"{row.busbw_bytes_per_s / 1e9:.3f} GB/s".rjust(12), row.group,
    ]  # fmt: skip


def _compared(row: CollectiveRow) -> tuple[str, str]:
    """The predicted and the measured time of a row; nothing without a prediction."""
    predicted = _predicted(row)
    return (f"{predicted} us", f"{row.time_s * 1e6:.1f} us") if predicted else ("", "")


def grouped(rows: Rows, *keys: str) -> list[tuple[tuple[str, ...], list[CollectiveRow]]]:
    """Group the rows by the printable values of `keys`. The groups are in the order of their first rows."""
    groups: dict[tuple[str, ...], list[CollectiveRow]] = {}
    for row in rows:
        groups.setdefault(tuple(printable(getattr(row, key)) for key in keys), []).append(row)
    return list(groups.items())


def _full_cells(row: CollectiveRow) -> tuple[str, ...]:
    return (
        str(row.size_bytes), _count(row.count), printable(row.dtype),
        printable(row.redop or "-"), f"{row.time_s * 1e6:.1f}", f"{row.spread:.0%}",
        f"{row.algbw_bytes_per_s / 1e9:.3f}", f"{row.busbw_bytes_per_s / 1e9:.3f}",
        _count(row.wrong),
    )  # fmt: skip


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def _aliases(row: CollectiveRow) -> str:
    """The other names of a group, as ` = axis shard`."""
    return "".join(f" = {printable(name)}" for name in row.also if name)


def _predicted(row: CollectiveRow) -> str:
    return "" if row.predicted_s is None else f"{row.predicted_s * 1e6:.1f}"
