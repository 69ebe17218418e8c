"""The models' own metrics (`LayeredModel.metrics`): the last value of each run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpc_parallel.report.figures import number
from hpc_parallel.report.gather import Row

PREFIX, LOSS = "validation_", "validation_loss"
MOST = 20


@dataclass(frozen=True)
class OwnMetrics:
    """A table: its columns, and a line for each run that has at least one of these metrics."""

    names: Sequence[str]
    lines: Sequence[tuple[Row, Sequence[float | None]]]


def own_metrics(rows: Sequence[Row]) -> OwnMetrics | None:
    """The table of the first MOST metrics; None if no run has one."""
    values = [_metrics_of(row) for row in rows]
    names = list(dict.fromkeys(name for metrics in values for name in metrics))[:MOST]
    lines = [(row, [metrics.get(name) for name in names]) for row, metrics in zip(rows, values, strict=True)]
    with_metrics = [(row, cells) for row, cells in lines if any(cell is not None for cell in cells)]
    return OwnMetrics(names, with_metrics) if with_metrics else None


def _metrics_of(row: Row) -> dict[str, float]:
    """The finite metrics in `summary.json`, without the prefix; anybody may have written the file."""
    return {
        key.removeprefix(PREFIX): figure
        for key, value in (row.run.summary or {}).items()
        if key.startswith(PREFIX) and key != LOSS and (figure := number(value)) is not None
    }
