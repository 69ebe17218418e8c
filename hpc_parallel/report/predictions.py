"""Planned figures beside the measured ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpc_parallel.report.figures import number
from hpc_parallel.report.gather import Row
from hpc_parallel.report.tables import Unit, column_of, unit_of

PREDICTABLE = (
    "step_time_s", "samples_per_s", "latency_s", "peak_memory_bytes", "bubble_share",
    "exposed_communication_share", "traffic_bytes",
)  # fmt: skip


@dataclass(frozen=True)
class Prediction:
    """A planned figure of a run, and the measured figure."""

    row: Row
    key: str
    predicted: float
    measured: float | None

    @property
    def unit(self) -> Unit:
        """The unit in which both figures are shown."""
        return unit_of(column_of(self.key).kind, (self.predicted, self.measured))

    @property
    def title(self) -> str:
        """`step time`."""
        return column_of(self.key).title

    @property
    def ratio(self) -> float | None:
        """Measured divided by predicted."""
        return self.measured / self.predicted if self.measured and self.predicted else None


def predictions(rows: Sequence[Row]) -> list[Prediction]:
    """The predictions of every run that has a plan."""
    result = []
    for row in rows:
        predicted = row.run.totals.predicted
        for key in PREDICTABLE:
            # On a CPU the measured peak includes the interpreter. A prediction does not include it.
            process = key == "peak_memory_bytes" and row.on_cpu
            if not process and (value := number(predicted.get(key))) is not None and value >= 0:
                result.append(Prediction(row, key, value, row.figures[key]))
    return result
