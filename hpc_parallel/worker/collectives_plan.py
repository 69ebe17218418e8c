"""The rows of `task=collectives`: what is measured in which order, and what the time budget leaves out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from hpc_parallel.config.task_schema import CollectivesConfig
from hpc_parallel.profiling.collective_cases import OPERATIONS, Group, sizes
from hpc_parallel.record.collectives_file import CollectiveRow
from hpc_parallel.record.collectives_table import row_cells
from hpc_parallel.worker.time_budget import TimeBudget, advice

BATCHES = 8  # batches of rounds; their spread shows how steady a time is
ROW_S = 0.5  # the most for the timed rounds of a row; more rounds do not make the median steadier
LATENCY_BYTES = 2**16  # up to here a message takes about as long as the smallest
Series = tuple[str, str, str]
"""(group, operation, type): a row for each size."""


@dataclass(frozen=True)
class PlannedRow:
    """One row to measure."""

    series: Series
    size_bytes: int


Measure = Callable[[PlannedRow, float], CollectiveRow]
"""(cell, seconds for its timed rounds) -> the row; a collective call."""


class CollectivesPlan:
    """Measures from small sizes to large ones: all collectives of one size, then all of the next.

    If the time is used up or the run is interrupted, the rows so far still compare all collectives.
    """

    def __init__(self, levels: Sequence[Sequence[PlannedRow]]) -> None:
        """levels: the cells by size."""
        self.levels = levels
        self.cells = [cell for level in levels for cell in level]
        self.rows: list[CollectiveRow] = []
        self.left_out: str | None = None  # with the reason
        # For each series: its last size, and the seconds that this size takes with as few rounds as possible.
        self._last: dict[Series, tuple[int, float]] = {}

    @classmethod
    def of(cls, task: CollectivesConfig, *, groups: Mapping[str, Group], most_bytes: int) -> CollectivesPlan:
        series = [
            (name, kind, dtype)
            for name, group in groups.items()
            for kind in task.operations or OPERATIONS
            if group.ranks >= OPERATIONS[kind].least_ranks
            for dtype in (task.dtypes if OPERATIONS[kind].has_size else ["float32"])
        ]
        sized = [one for one in series if OPERATIONS[one[1]].has_size]
        all_sizes = sizes(task.min_bytes, most_bytes, factor=task.factor)
        first = [PlannedRow(one, all_sizes[0] if one in sized else 0) for one in series]
        return cls([first, *([PlannedRow(one, size) for one in sized] for size in all_sizes[1:])])

    def measure(self, measure: Measure, budget: TimeBudget) -> Iterator[CollectiveRow]:
        """Yields each row when it is measured. The smallest size is always measured."""
        for number, level in enumerate(self.levels):
            needed_s = sum(map(self._least_s, level))
            if number > 0 and budget.left_s(after_s=needed_s) < 0:
                break
            for cell in level:
                left_s = budget.left_s()
                if number > 0 and left_s < 0:
                    break
                # Half of the time is for checks and buffers, and for large sizes, which take longer.
                share_s = max(0.0, left_s) / (len(self.cells) - len(self.rows)) / 2
                yield self._measure(cell, measure, seconds=min(ROW_S, share_s), budget=budget)
        if rest := self.cells[len(self.rows) :]:
            reason = advice(budget, needed_s=sum(map(self._least_s, rest)))
            what = f"{len(rest)} of {len(self.cells)} rows, from {rest[0].size_bytes:,} bytes on"
            self.left_out = f"left out: {what}: {reason}"

    def stopped_by(self, signal_name: str) -> None:
        """Record that a signal has ended `measure`, so that no reader thinks that the rows are complete."""
        if missing := len(self.cells) - len(self.rows):
            self.left_out = f"left out: {missing} of {len(self.cells)} rows: stopped by {signal_name}"

    def metrics_line(self, budget: TimeBudget) -> dict[str, Any]:
        """The line of `metrics.jsonl` for the newest row."""
        row, done, count = self.rows[-1], len(self.rows), len(self.cells)
        rest_s = sum(ROW_S + self._least_s(cell) for cell in self.cells[done:])
        return {
            "step": done,
            "steps": count,
            "measured": row_cells(row),
            "time_left_s": max(0.0, min(budget.seconds - budget.used_s, rest_s)),
            **row.measured,
            "time": datetime.now(UTC).isoformat(),
        }

    def sorted_rows(self) -> list[CollectiveRow]:
        """The rows by group, operation and type."""
        order = {cell.series: number for number, cell in enumerate(self.levels[0])}
        return sorted(self.rows, key=lambda row: order[row.group, row.operation, row.dtype])

    def _measure(
        self, cell: PlannedRow, measure: Measure, *, seconds: float, budget: TimeBudget
    ) -> CollectiveRow:
        began_s = budget.used_s
        row = measure(cell, seconds)
        least_s = budget.used_s - began_s - row.time_s * (row.rounds - BATCHES)
        self._last[cell.series] = cell.size_bytes, least_s
        self.rows.append(row)
        return row

    def _least_s(self, cell: PlannedRow) -> float:
        """The least time of a cell if it is proportional to the size; 0 before its series has a row."""
        last_bytes, least_s = self._last.get(cell.series, (0, 0.0))
        return least_s * max(1.0, cell.size_bytes / max(last_bytes, LATENCY_BYTES))
