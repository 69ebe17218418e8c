"""The rows of `task=collectives`: what is measured in which order, and what the time budget leaves out."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from hpc_parallel.config.task_schema import CollectivesConfig
from hpc_parallel.measure.collective_cases import OPERATIONS, Group, sizes
from hpc_parallel.record.collectives_file import CollectiveRow, row_cells
from hpc_parallel.worker.time_budget import TimeBudget, advice

WARM_UP = 3  # rounds; the first rounds allocate buffers and connect ranks
BATCHES = 8  # batches of rounds; their spread shows how steady a time is
ROW_S = 0.5  # the most for the timed rounds of a row; more rounds do not make the median steadier
LATENCY_BYTES = 2**16  # up to here a message takes about as long as the smallest
CURVE = 3  # sizes that are measured whatever the budget: the smallest, the middle and the largest
Series = tuple[str, str, str]
"""(group, operation, type): a row for each size."""


@dataclass(frozen=True)
class PlannedRow:
    """One row to measure."""

    series: Series
    size_bytes: int


@dataclass(frozen=True)
class RowTime:
    """seconds: the most for the timed rounds. limit_s: if even `BATCHES` rounds take longer, make fewer."""

    seconds: float
    limit_s: float = math.inf


Measure = Callable[[PlannedRow, RowTime], CollectiveRow]
"""(cell, its time) -> the row; a collective call."""


class CollectivesPlan:
    """Measures all collectives of one size, then all of the next: first a coarse curve, then sizes between.

    If the time is used up or the run is interrupted, the rows so far still compare all collectives.
    """

    def __init__(self, levels: Sequence[Sequence[PlannedRow]]) -> None:
        """levels: the cells of each size, in the order of measuring; `CURVE` of them in any case."""
        self.levels = levels
        self.cells = [cell for level in levels for cell in level]
        self.rows: list[CollectiveRow] = []
        self.left_out: str | None = None  # with the reason
        # For each series and size: the seconds that it takes with as few rounds as possible.
        self._least: dict[Series, dict[int, float]] = defaultdict(dict)

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
        all_sizes = coarse_first(sizes(task.min_bytes, most_bytes, factor=task.factor))
        first = [PlannedRow(one, all_sizes[0] if one in sized else 0) for one in series]
        return cls([first, *([PlannedRow(one, size) for one in sized] for size in all_sizes[1:])])

    def measure(self, measure: Measure, budget: TimeBudget) -> Iterator[CollectiveRow]:
        """Yields each row when it is measured; sizes of the coarse curve are measured in any case."""
        curve = sum(map(len, self.levels[:CURVE]))
        for number, level in enumerate(self.levels):
            is_between = number >= CURVE
            for index, cell in enumerate(level):
                needed_s = sum(map(self._least_s, level[index:])) if is_between else 0.0
                left_s = budget.left_s(after_s=needed_s)
                if is_between and left_s < 0:
                    break
                half_s = max(0.0, left_s) / 2  # the other half is for checks, buffers and slower rows
                seconds = min(ROW_S, half_s / (len(self.cells) - len(self.rows)))
                limit_s = math.inf if is_between else max(ROW_S, half_s / (curve - len(self.rows)))
                yield self._measure(cell, measure, RowTime(seconds, limit_s), budget=budget)
        if rest := self._rest():
            by_size = ", ".join(f"{size:,}" for size in sorted({cell.size_bytes for cell in rest}))
            brief_s = sum(row.time_s * (WARM_UP + BATCHES) for row in self.rows if row.rounds < BATCHES)
            reason = advice(budget, needed_s=brief_s + sum(map(self._least_s, rest)))
            self.left_out = f"left out: {len(rest)} of {len(self.cells)} rows, of {by_size} bytes: {reason}"

    def stopped_by(self, signal_name: str) -> None:
        """Record that a signal has ended `measure`, so that no reader thinks that the rows are complete."""
        if missing := len(self.cells) - len(self.rows):
            self.left_out = f"left out: {missing} of {len(self.cells)} rows: stopped by {signal_name}"

    def metrics_line(self, budget: TimeBudget) -> dict[str, Any]:
        """The line of `metrics.jsonl` for the newest row."""
        row, done, count = self.rows[-1], len(self.rows), len(self.cells)
        rest_s = sum(ROW_S + self._least_s(cell) for cell in self._rest())
        return {
            "step": done, "steps": count, "measured": row_cells(row),
            "time_left_s": max(0.0, min(budget.seconds - budget.used_s, rest_s)), **row.measured,
            "time": datetime.now(UTC).isoformat(),
        }  # fmt: skip

    def sorted_rows(self) -> list[CollectiveRow]:
        order = {cell.series: number for number, cell in enumerate(self.levels[0])}
        return sorted(self.rows, key=lambda row: (order[row.group, row.operation, row.dtype], row.size_bytes))

    def _measure(
        self, cell: PlannedRow, measure: Measure, time: RowTime, *, budget: TimeBudget
    ) -> CollectiveRow:
        began_s = budget.used_s
        row = measure(cell, time)
        least_s = budget.used_s - began_s - row.time_s * (row.rounds - BATCHES)
        self._least[cell.series][cell.size_bytes] = least_s
        self.rows.append(row)
        return row

    def _rest(self) -> list[PlannedRow]:
        return [cell for cell in self.cells if cell.size_bytes not in self._least[cell.series]]

    def _least_s(self, cell: PlannedRow) -> float:
        """The least time of a cell; 0 before its series has a row.

        The time is at most proportional to the size, and at most that of a larger size: a series connects
        its ranks in its first row, which is slower for that.
        """
        least = self._least[cell.series]
        below = max((size for size in least if size <= cell.size_bytes), default=None)
        if below is None:
            return 0.0
        grown_s = least[below] * max(1.0, cell.size_bytes / max(below, LATENCY_BYTES))
        return min([grown_s, *(time_s for size, time_s in least.items() if size > cell.size_bytes)])


def coarse_first(ascending: Sequence[int]) -> list[int]:
    """The smallest, the middle and the largest, then the middle of each gap, and so on."""
    last = len(ascending) - 1
    parts = [2 ** (depth + 1) for depth in range(last.bit_length() + 1)]
    return list(dict.fromkeys(ascending[last * part // of] for of in parts for part in range(of + 1)))
