"""Latency against throughput of `task=infer`, by batch size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpc_parallel.record.metrics_file import MetricsLine
from hpc_parallel.report.escaping import to_csv
from hpc_parallel.report.figures import number
from hpc_parallel.report.gather import Row

MAX_SIZES = 200  # batch sizes of one run: a real measurement has fewer
KEYS = ("batch_size", "latency_s", "latency_p99_s", "samples_per_s", "tokens_per_s")


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
    size, latency_s, p99_s, rate, tokens = map(number, (
        line.batch_size, line.latency_s, line.latency_p99_s, line.samples_per_s, line.tokens_per_s
    ))  # fmt: skip
    if not isinstance(size, int) or size < 1 or not latency_s or latency_s < 0 or not rate or rate < 0:
        return None
    return BatchTiming(size, latency_s, p99_s if p99_s and p99_s >= latency_s else None, rate, tokens)


def table(curves: Sequence[LatencyCurve]) -> str:
    """CSV with one line per batch size, in the units and names of `metrics.jsonl`; empty without curves."""
    if not curves:
        return ""
    return to_csv(
        ["run", "folder", "state", *KEYS],
        (
            [curve.row.label, curve.row.folder, curve.row.state, *(getattr(point, key) for key in KEYS)]
            for curve in curves
            for point in curve.points
        ),
    )
