"""What `task=collectives` measured: a table of all runs, and a plot for each collective."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from hpc_parallel.config.tasks import COLLECTIVES
from hpc_parallel.problems import printable
from hpc_parallel.record.collectives_table import valid_rows
from hpc_parallel.record.safe_read import read_json
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
from hpc_parallel.report.figures import number
from hpc_parallel.report.gather import Row
from hpc_parallel.report.labels import legend

MICRO, GIGA = 1e-6, 1e9
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


@dataclass(frozen=True)
class Point:
    """One size. time_s: of one call; bus_rate: bytes per second, as nccl-tests counts them."""

    size_bytes: float
    time_s: float
    bus_rate: float


@dataclass(frozen=True)
class Curve:
    """A collective over one group of ranks of a run, by size."""

    row: Row
    operation: str
    group: str
    ranks: int
    dtype: str
    points: Sequence[Point]

    @property
    def cells(self) -> tuple[str, ...]:
        """As texts: group and ranks, operation, type, least time, largest bus bandwidth and its size."""
        best = max(self.points, key=lambda point: point.bus_rate)
        rate = (f"{best.bus_rate / GIGA:.3f}", bytes_text(best.size_bytes)) if best.bus_rate else ("-", "-")
        latency_s = min(point.time_s for point in self.points)
        return f"{self.group} ({self.ranks})", self.operation, self.dtype, f"{latency_s / MICRO:.1f}", *rate


def curves(rows: Sequence[Row]) -> list[Curve]:
    """The curves of all runs."""
    return [curve for row in rows for curve in _curves_of(row)]


def _curves_of(row: Row) -> Iterator[Curve]:
    points: dict[tuple[str, str, int, str], dict[float, Point]] = defaultdict(dict)
    for line in _lines(row):
        size, time_s, rate = (number(line[key]) for key in ("size_bytes", "time_s", "busbw_bytes_per_s"))
        if size is not None and rate is not None and time_s and size >= 0 and rate >= 0 and time_s > 0:
            group, dtype = printable(line["group"]), printable(line["dtype"])
            points[line["operation"], group, line["ranks"], dtype][size] = Point(size, time_s, rate)
    for (operation, group, ranks, dtype), by_size in points.items():
        yield Curve(row, operation, group, ranks, dtype, [by_size[size] for size in sorted(by_size)])


def _lines(row: Row) -> list[Mapping[str, Any]]:
    """The measured rows; anybody may have written the file."""
    try:
        lines = valid_rows(read_json(row.run.folder.collectives))
    except (OSError, ValueError):
        return []
    return [line for line in lines if line["operation"] in COLLECTIVES]


def plots(rows: Sequence[Row]) -> Iterator[Plot]:
    """Yields a plot for each collective that moves data, with one curve for each group of each run."""
    by_operation: dict[str, list[Curve]] = defaultdict(list)
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


def _words(curves: Sequence[Curve]) -> list[Sequence[str]]:
    """The parts of the labels of curves, of which a legend keeps what differs."""
    by_run = words_of([curve.row for curve in curves])
    return [
        (*words, f"{curve.group} ({curve.ranks})", curve.dtype)
        for words, curve in zip(by_run, curves, strict=True)
    ]


def _common(curves: Sequence[Curve]) -> str:
    """What all curves have in common, which their legend leaves out."""
    first, *others = _words(curves)
    common = [word for word in first if all(word in words for words in others)]
    return f": {', '.join(common)}" if common else ""


def _figure(shown: Sequence[Curve]) -> Figure:
    figure, ((times, rates),) = canvas(3.6, columns=2)
    points = [point for curve in shown for point in curve.points if point.size_bytes > 0]
    name = f"time of {shown[0].operation}, us"
    logarithmic(times.yaxis, [point.time_s / MICRO for point in points], name=name)
    handles = []
    for index, curve in enumerate(shown):
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
    add_legend(figure, handles, legend(_words(shown)))
    return figure


def bytes_text(size: float) -> str:
    """`4 KiB`."""
    factor, unit = next((scale for scale in _UNITS if size >= scale[0]), _UNITS[-1])
    return f"{size / factor:g} {unit}"
