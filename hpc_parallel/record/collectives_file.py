"""What `task=collectives` measured: `collectives.json`, which anybody may have written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.record.typed import build, first, read_record

MOST_ROWS, MOST_WARNINGS, MOST_NAMES = 10_000, 100, 8
PREDICTED = "predicted_s"  # a key of the rows if the run had a machine profile


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
class Collectives:
    """The content of `collectives.json`. warnings: what takes longer than a machine profile predicts."""

    device: str | None = None
    backend: str | None = None
    sum: CollectiveRow | None = None  # the all-reduce that comes first
    rows: Annotated[tuple[CollectiveRow, ...], first(MOST_ROWS)] = ()
    left_out: str | None = None  # what was left out, with the reason
    warnings: Annotated[tuple[str, ...], first(MOST_WARNINGS)] = ()

    @classmethod
    def read(cls, folder: RunFolder) -> Collectives | None:
        """None if there is no file. Raises DamagedError."""
        return read_record(cls, folder.collectives)

    def write(self, folder: RunFolder, *, with_predictions: bool) -> None:
        rows = [vars(row) if with_predictions else row.measured for row in self.rows]
        write_json(folder.collectives, vars(self) | {"sum": self.sum and self.sum.measured, "rows": rows})


def rows_of(lines: Iterable[Any]) -> list[CollectiveRow]:
    """The rows in lines of `metrics.jsonl`; other lines are left out."""
    return [row for line in lines if (row := build(CollectiveRow, line)) is not None][:MOST_ROWS]
