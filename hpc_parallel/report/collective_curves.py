"""What `task=collectives` measured in all runs, by size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpc_parallel.config.task_schema import COLLECTIVES
from hpc_parallel.problems import printable
from hpc_parallel.record.collectives_file import CollectiveRow, Collectives
from hpc_parallel.record.typed import read_if_possible
from hpc_parallel.report import picture
from hpc_parallel.report.figures import number
from hpc_parallel.report.gather import Row
from hpc_parallel.report.labels import legend

MICRO, GIGA = 1e-6, 1e9
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


@dataclass(frozen=True)
class CollectiveCurve:
    """A collective over one group of ranks of a run, by size."""

    row: Row
    operation: str
    group: str
    ranks: int
    dtype: str
    points: Sequence[CollectiveRow]

    @property
    def cells(self) -> tuple[str, ...]:
        """As texts: group and ranks, operation, type, least time, largest bus bandwidth and its size."""
        best = max(self.points, key=lambda point: point.busbw_bytes_per_s)
        rate = (
            (f"{best.busbw_bytes_per_s / GIGA:.3f}", bytes_text(best.size_bytes))
            if best.busbw_bytes_per_s
            else ("-", "-")
        )
        latency_s = min(point.time_s for point in self.points)
        return f"{self.group} ({self.ranks})", self.operation, self.dtype, f"{latency_s / MICRO:.1f}", *rate


def curves(rows: Sequence[Row]) -> list[CollectiveCurve]:
    return [curve for row in rows for curve in _curves_of(row)]


def _curves_of(row: Row) -> Iterator[CollectiveCurve]:
    points: dict[tuple[str, str, int, str], dict[int, CollectiveRow]] = defaultdict(dict)
    for line in _lines(row):
        figures = line.size_bytes, line.time_s, line.busbw_bytes_per_s
        if None not in map(number, figures) and min(figures) >= 0 and line.time_s > 0:
            group, dtype = printable(line.group), printable(line.dtype)
            points[line.operation, group, line.ranks, dtype][line.size_bytes] = line
    for (operation, group, ranks, dtype), by_size in points.items():
        yield CollectiveCurve(
            row, operation, group, ranks, dtype, [by_size[size] for size in sorted(by_size)]
        )


def _lines(row: Row) -> list[CollectiveRow]:
    measured = read_if_possible(Collectives, row.run.folder.collectives) or Collectives()
    return [line for line in measured.rows if line.operation in COLLECTIVES]


def bytes_text(size: float) -> str:
    """`4 KiB`."""
    factor, unit = next((scale for scale in _UNITS if size >= scale[0]), _UNITS[-1])
    return f"{size / factor:g} {unit}"


def pictures(rows: Sequence[Row]) -> Iterator[picture.Picture]:
    """Yields a plot for each collective that moves data, with one curve for each group of each run."""
    by_operation: dict[str, list[CollectiveCurve]] = defaultdict(list)
    for curve in curves(rows):
        if sum(point.size_bytes > 0 for point in curve.points) > 1:
            by_operation[curve.operation].append(curve)
    for operation, of_one in by_operation.items():
        words = _words(of_one)
        common = [word for word in words[0] if all(word in label for label in words)]
        yield picture.Picture(
            f"collectives_{operation}", "collectives",
            f"{operation} by size{': ' * bool(common)}{', '.join(common)}",
            "Left: time of one call on the slowest rank. Right: bus bandwidth, as nccl-tests defines it."
            + picture.first_of(picture.MAX_CURVES, len(of_one)),
            _graphs(of_one[:picture.MAX_CURVES]),
        )  # fmt: skip


def _words(curves: Sequence[CollectiveCurve]) -> list[Sequence[str]]:
    """The parts of each curve's label. A legend shows only the parts that differ."""
    by_run = picture.words_of([curve.row for curve in curves])
    return [
        (*label, f"{curve.group} ({curve.ranks})", curve.dtype)
        for label, curve in zip(by_run, curves, strict=True)
    ]


def _graphs(curves: Sequence[CollectiveCurve]) -> picture.Graphs:
    times, rates = [], []
    for index, (curve, text) in enumerate(zip(curves, legend(_words(curves)), strict=True)):
        points = [point for point in curve.points if point.size_bytes > 0]
        of_time = [(point.size_bytes, point.time_s / MICRO) for point in points]
        of_rate = [(point.size_bytes, point.busbw_bytes_per_s / GIGA) for point in points]
        times.append(picture.Curve(of_time, picture.style(index), text))
        rates.append(picture.Curve(of_rate, picture.style(index)))
    size = picture.PlotAxis("size", picture.SIZES, text=bytes_text)
    time = picture.PlotAxis(f"time of {curves[0].operation}, us", picture.LOGARITHMIC)
    rate = picture.PlotAxis("bus bandwidth, GB/s", picture.FROM_ZERO)
    return picture.Graphs([("", [picture.Graph(size, time, times), picture.Graph(size, rate, rates)])], 3.6)
