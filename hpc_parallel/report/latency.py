"""Latency against throughput of `task=infer`, by batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from hpc_parallel.report.drawing import (
    Note,
    add_legend,
    annotate,
    canvas,
    kinds,
    logarithmic,
    name_panel,
    style,
    words_of,
)
from hpc_parallel.report.figures import number
from hpc_parallel.report.gather import Row
from hpc_parallel.report.labels import legend
from hpc_parallel.report.spreadsheet import to_csv
from hpc_parallel.report.tables import Unit, unit_of

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
class Curve:
    """A run's timings, by batch size."""

    row: Row
    points: Sequence[BatchTiming]


def curves(rows: Sequence[Row]) -> list[Curve]:
    """The curve of every run with timings, also while it runs; the newest line of a batch size counts."""
    result = []
    for row in rows:
        points = {point.batch_size: point for line in row.run.metrics if (point := _timing(line))}
        if points:
            result.append(Curve(row, [points[size] for size in sorted(points)[:MAX_SIZES]]))
    return result


def _timing(line: Mapping[str, Any]) -> BatchTiming | None:
    """The timing in a line of metrics; None if a figure is missing or invalid."""
    size, latency_s, p99_s, rate, tokens = (number(line.get(key)) for key in KEYS)
    if not isinstance(size, int) or size < 1 or not latency_s or latency_s < 0 or not rate or rate < 0:
        return None
    return BatchTiming(size, latency_s, p99_s if p99_s and p99_s >= latency_s else None, rate, tokens)


def table(curves: Sequence[Curve]) -> str:
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


def figure(curves: Sequence[Curve]) -> Figure:
    """Plot latency over throughput, one curve per run and one panel per kind of work."""
    of_kinds = kinds([curve.row for curve in curves], most=len(curves))
    points = [point for curve in curves for point in curve.points]
    unit = unit_of("seconds", (point.latency_s for point in points))
    drawing, panels = canvas(*(3.8 for _ in of_kinds))
    shown = [curve for kind in of_kinds for curve in curves if curve.row in kind.rows]
    notes = []
    for (axes,), kind in zip(panels, of_kinds, strict=True):
        name_panel(axes, kind.title)
        of_kind = [curve for curve in shown if curve.row in kind.rows]
        notes.append((axes, _draw(axes, of_kind, unit, first=shown.index(of_kind[0]))))
    handles = [Line2D([], [], **style(index)) for index in range(len(shown))]
    add_legend(drawing, handles, legend(words_of([curve.row for curve in shown])))
    for axes, of_axes in notes:
        annotate(drawing, axes, of_axes)
    return drawing


def _draw(axes: Axes, curves: Sequence[Curve], unit: Unit, *, first: int) -> list[Note]:
    """Draw curves; returns the batch sizes to write beside them, those of the ends first.

    Batch sizes grow by factors, and so do latency and throughput: both axes are logarithmic.
    """
    points = [point for curve in curves for point in curve.points]
    logarithmic(axes.xaxis, [point.samples_per_s for point in points], name="throughput, samples/s")
    name = f"latency of a batch, {unit.name}"
    tops = [point.latency_p99_s or point.latency_s for point in points]
    logarithmic(axes.yaxis, [s / unit.size for s in (*tops, *(p.latency_s for p in points))], name=name)
    ends: list[Note] = []
    between: list[Note] = []
    for index, curve in enumerate(curves, start=first):
        rates = [point.samples_per_s for point in curve.points]
        latencies = [point.latency_s / unit.size for point in curve.points]
        percentiles = [(point.latency_p99_s or point.latency_s) / unit.size for point in curve.points]
        curve_style = style(index)
        axes.vlines(rates, latencies, percentiles, color=curve_style["color"], linewidth=0.8, alpha=0.6)
        axes.plot(rates, latencies, **curve_style)
        notes = [
            Note(rate, latency, str(point.batch_size))
            for rate, latency, point in zip(rates, latencies, curve.points, strict=True)
        ]
        ends += notes[:1] + notes[1:][-1:]
        between += notes[1:-1]
    return [*ends, *between]
