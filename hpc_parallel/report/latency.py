"""Latency against throughput: what each batch size of `task=infer` costs, and what it gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from hpc_parallel.report.drawing import Note, annotate, canvas, short, spread, style
from hpc_parallel.report.gather import Row, number
from hpc_parallel.report.spreadsheet import to_csv
from hpc_parallel.report.tables import unit_of

MOST_SIZES = 200  # of one run: more are no measurement
KEYS = ("batch_size", "latency_s", "latency_p99_s", "samples_per_s", "tokens_per_s")


@dataclass(frozen=True)
class Timed:
    """One batch size: the time from its start to its end (median and 99th percentile), and the rate."""

    batch_size: int
    latency_s: float
    latency_p99_s: float | None
    samples_per_s: float
    tokens_per_s: float | None


@dataclass(frozen=True)
class Curve:
    """A run's batch sizes, rising."""

    row: Row
    points: Sequence[Timed]


def curves(rows: Sequence[Row]) -> list[Curve]:
    """Of every run that timed a batch, also where it goes on; of a batch size the newest line tells."""
    found = []
    for row in rows:
        points = {point.batch_size: point for line in row.run.metrics if (point := _timed(line))}
        if points:
            found.append(Curve(row, [points[size] for size in sorted(points)[:MOST_SIZES]]))
    return found


def _timed(line: Mapping[str, Any]) -> Timed | None:
    """None for a line of another kind, or of which a figure is missing or foreign."""
    size, latency_s, p99_s, rate, tokens = (number(line.get(key)) for key in KEYS)
    if not isinstance(size, int) or size < 1 or not latency_s or latency_s < 0 or not rate or rate < 0:
        return None
    return Timed(size, latency_s, p99_s if p99_s and p99_s >= latency_s else None, rate, tokens)


def table(found: Sequence[Curve]) -> str:
    """CSV, a line a batch size, in SI units by the names of `metrics.jsonl`; empty without any."""
    if not found:
        return ""
    return to_csv(
        ["run", "folder", "state", *KEYS],
        (
            [curve.row.label, curve.row.folder, curve.row.state, *(getattr(point, key) for key in KEYS)]
            for curve in found
            for point in curve.points
        ),
    )


def figure(found: Sequence[Curve]) -> Figure:
    """A curve a run, latency over throughput."""
    drawn, axes = canvas(4.6)
    every = [point for curve in found for point in curve.points]
    unit = unit_of("seconds", (point.latency_s for point in every))
    ends: list[Note] = []
    between: list[Note] = []
    for place, curve in enumerate(found):
        rates = [point.samples_per_s for point in curve.points]
        latencies = [point.latency_s / unit.size for point in curve.points]
        reach = [(point.latency_p99_s or point.latency_s) / unit.size for point in curve.points]
        look = style(place)
        axes.vlines(rates, latencies, reach, color=look["color"], linewidth=0.8, alpha=0.6)
        axes.plot(rates, latencies, label=short(curve.row.label), **look)
        notes = [
            Note(rate, latency, str(point.batch_size))
            for rate, latency, point in zip(rates, latencies, curve.points, strict=True)
        ]
        ends += notes[:1] + notes[1:][-1:]
        between += notes[1:-1]
    spread(axes.xaxis, [point.samples_per_s for point in every], name="throughput, samples/s")
    spread(axes.yaxis, [point.latency_s for point in every], name=f"latency of a batch, {unit.name}")
    drawn.legend(loc="outside lower left", ncols=2, fontsize=9)
    annotate(drawn, axes, [*ends, *between])
    return drawn
