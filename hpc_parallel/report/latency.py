"""Latency against throughput of `task=infer`, by batch size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpc_parallel.record.metrics_file import MetricsLine
from hpc_parallel.report import picture
from hpc_parallel.report.figures import number
from hpc_parallel.report.gather import Row
from hpc_parallel.report.labels import legend
from hpc_parallel.report.tables import Unit, unit_of

MAX_SIZES = 200  # batch sizes of one run: a real measurement has fewer


@dataclass(frozen=True)
class BatchTiming:
    """The latency (median and 99th percentile) and throughput of one batch size."""

    batch_size: int
    latency_s: float
    latency_p99_s: float | None
    samples_per_s: float
    tokens_per_s: float | None


@dataclass(frozen=True)
class LatencyCurve:
    """A run's timings, by batch size."""

    row: Row
    points: Sequence[BatchTiming]


def curves(rows: Sequence[Row]) -> list[LatencyCurve]:
    """The curve of every run with timings, even while the run continues.

    The newest line of each batch size counts.
    """
    result = []
    for row in rows:
        # Only a few of up to 500,000 lines have this key. The others are skipped first.
        lines = (MetricsLine.of(line) for line in row.run.metrics if "batch_size" in line)
        points = {point.batch_size: point for line in lines if (point := _timing(line))}
        if points:
            result.append(LatencyCurve(row, [points[size] for size in sorted(points)[:MAX_SIZES]]))
    return result


def _timing(line: MetricsLine) -> BatchTiming | None:
    """The timing in a line of metrics; None if a figure is missing or invalid."""
    size, latency_s, p99_s, rate, tokens = map(
        number, (line.batch_size, line.latency_s, line.latency_p99_s, line.samples_per_s, line.tokens_per_s)
    )
    if not isinstance(size, int) or size < 1 or not latency_s or latency_s < 0 or not rate or rate < 0:
        return None
    return BatchTiming(size, latency_s, p99_s if p99_s and p99_s >= latency_s else None, rate, tokens)


def pictures(rows: Sequence[Row]) -> Iterator[picture.Picture]:
    """Yields the plot of latency over throughput if a run has timings, with a panel for each kind of work.

    Batch sizes, latency and throughput grow by factors, so both axes are logarithmic.
    """
    timed = curves(rows)
    if not timed:
        return
    by_run = {curve.row.run.path: curve for curve in timed[: picture.MAX_CURVES]}
    of_kinds = picture.kinds([curve.row for curve in by_run.values()], most=picture.MAX_CURVES)
    unit = unit_of("seconds", (point.latency_s for curve in by_run.values() for point in curve.points))
    scales = (
        picture.PlotAxis("throughput, samples/s", picture.LOGARITHMIC),
        picture.PlotAxis(f"latency of a batch, {unit.name}", picture.LOGARITHMIC),
    )
    texts = legend(picture.words_of([row for kind in of_kinds for row in kind.rows]))
    numbered = enumerate(texts)
    panels = []
    for kind in of_kinds:
        lines = [_line(by_run[row.run.path], unit, *next(numbered)) for row in kind.rows]
        panels.append((kind.title, [picture.Graph(*scales, lines)]))
    yield picture.Picture(
        "latency", "latency", "Latency against throughput, by batch size",
        "A point is a batch size of a run, with its number if there is room. It shows the median; the "
        "thin line ends at the 99th percentile. Better is down and to the right."
        + picture.first_of(len(texts), len(timed)),
        picture.Graphs(panels, 3.8),
    )  # fmt: skip


def _line(curve: LatencyCurve, unit: Unit, index: int, text: str) -> picture.Curve:
    return picture.Curve(
        [(point.samples_per_s, point.latency_s / unit.size) for point in curve.points],
        picture.style(index),
        text,
        tops=[(point.latency_p99_s or point.latency_s) / unit.size for point in curve.points],
        notes=[str(point.batch_size) for point in curve.points],
    )
