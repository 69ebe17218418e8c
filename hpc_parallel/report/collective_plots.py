"""A plot for each collective that `task=collectives` measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from hpc_parallel.report.collective_curves import GIGA, MICRO, CollectiveCurve, bytes_text, curves
from hpc_parallel.report.drawing import (
    MAX_CURVES,
    Plot,
    add_legend,
    canvas,
    first_of,
    is_wide,
    logarithmic,
    plot,
    style,
    words_of,
)
from hpc_parallel.report.gather import Row
from hpc_parallel.report.labels import legend


def plots(rows: Sequence[Row]) -> Iterator[Plot]:
    """Yields a plot for each collective that moves data, with one curve for each group of each run."""
    by_operation: dict[str, list[CollectiveCurve]] = defaultdict(list)
    for curve in curves(rows):
        if sum(point.size_bytes > 0 for point in curve.points) > 1:
            by_operation[curve.operation].append(curve)
    for operation, of_one in by_operation.items():
        yield plot(
            f"collectives_{operation}", "collectives", f"{operation} by size{_common(of_one)}",
            "Left: time of one call on the slowest rank. Right: bus bandwidth, as nccl-tests defines it."
            + first_of(MAX_CURVES, len(of_one)),
            partial(_figure, of_one[:MAX_CURVES]),
        )  # fmt: skip


def _words(curves: Sequence[CollectiveCurve]) -> list[Sequence[str]]:
    """The parts of each curve's label. A legend shows only the parts that differ."""
    by_run = words_of([curve.row for curve in curves])
    return [
        (*label, f"{curve.group} ({curve.ranks})", curve.dtype)
        for label, curve in zip(by_run, curves, strict=True)
    ]


def _common(curves: Sequence[CollectiveCurve]) -> str:
    """The parts that all curves have in common. Their legend leaves them out."""
    first, *others = _words(curves)
    common = [word for word in first if all(word in label for label in others)]
    return f": {', '.join(common)}" if common else ""


def _figure(curves: Sequence[CollectiveCurve]) -> Figure:
    figure, ((times, rates),) = canvas(3.6, columns=2)
    points = [point for curve in curves for point in curve.points if point.size_bytes > 0]
    name = f"time of {curves[0].operation}, us"
    logarithmic(times.yaxis, [point.time_s / MICRO for point in points], name=name)
    handles = []
    for index, curve in enumerate(curves):
        drawn = [point for point in curve.points if point.size_bytes > 0]
        sizes = [point.size_bytes for point in drawn]
        handles += times.plot(sizes, [point.time_s / MICRO for point in drawn], **style(index))
        rates.plot(sizes, [point.bus_rate / GIGA for point in drawn], **style(index))
    for axes in (times, rates):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(LogLocator(2, numticks=6 if is_wide() else 5))  # names of sizes are long
        axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: bytes_text(size)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("size")
    rates.set_ylim(bottom=0)
    rates.set_ylabel("bus bandwidth, GB/s")
    add_legend(figure, handles, legend(_words(curves)))
    return figure
