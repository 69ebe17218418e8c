"""Draws latency against throughput of `task=infer`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from hpc_parallel.report.drawing import (
    MAX_CURVES,
    Note,
    Plot,
    WorkKind,
    add_legend,
    annotate,
    canvas,
    drawn_of,
    kinds,
    logarithmic,
    name_panel,
    plot,
    style,
    words_of,
)
from hpc_parallel.report.gather import Row
from hpc_parallel.report.labels import legend
from hpc_parallel.report.latency import LatencyCurve, curves
from hpc_parallel.report.tables import Unit, unit_of


def plots(rows: Sequence[Row]) -> Iterator[Plot]:
    """Yields the plot if a run has timings."""
    if timed := curves(rows):
        of_kinds = kinds([curve.row for curve in timed[:MAX_CURVES]], most=MAX_CURVES)
        yield plot(
            "latency", "latency", "Latency against throughput, by batch size",
            "A point is a batch size of a run, with its number if there is room. It shows the median; the "
            "thin line ends at the 99th percentile. Better is down and to the right."
            + drawn_of((kind.rows for kind in of_kinds), len(timed)),
            lambda: _figure(timed[:MAX_CURVES], of_kinds),
        )  # fmt: skip


def _figure(curves: Sequence[LatencyCurve], of_kinds: Sequence[WorkKind]) -> Figure:
    """Plot latency over throughput, one curve per run and one panel per kind of work."""
    points = [point for curve in curves for point in curve.points]
    unit = unit_of("seconds", (point.latency_s for point in points))
    drawing, panels = canvas(*(3.8 for _ in of_kinds))
    drawn = [curve for kind in of_kinds for curve in curves if curve.row in kind.rows]
    notes = []
    for (axes,), kind in zip(panels, of_kinds, strict=True):
        name_panel(axes, kind.title)
        of_kind = [curve for curve in drawn if curve.row in kind.rows]
        notes.append((axes, _draw(axes, of_kind, unit, first=drawn.index(of_kind[0]))))
    handles = [Line2D([], [], **style(index)) for index in range(len(drawn))]
    add_legend(drawing, handles, legend(words_of([curve.row for curve in drawn])))
    for axes, of_axes in notes:
        annotate(drawing, axes, of_axes)
    return drawing


def _draw(axes: Axes, curves: Sequence[LatencyCurve], unit: Unit, *, first: int) -> list[Note]:
    """Draw curves; returns the batch sizes to write beside them. The ends of the curves come first.

    Batch sizes, latency and throughput grow by factors. Both axes are therefore logarithmic.
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
