"""Throughput and efficiency by the number of devices, beside the ideal, with a panel for each workload."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter, NullLocator

from hpc_parallel.report.drawing import (
    COLOURS,
    MAX_CURVES,
    Plot,
    add_legend,
    canvas,
    drawn_of,
    ink,
    logarithmic,
    name_panel,
    panels_of,
    plot,
    style,
)
from hpc_parallel.report.labels import legend, titles_of_work
from hpc_parallel.report.tables import STRONG, WEAK, Series

IDEAL: dict[str, Any] = {"linestyle": (0, (1, 1.5)), "linewidth": 1}


def plots(series: Sequence[Series]) -> Iterator[Plot]:
    """A plot of strong scaling and one of weak scaling."""
    for kind in (STRONG, WEAK):
        if of_kind := [one_series for one_series in series if one_series.kind == kind]:
            groups = panels_of(of_kind[:MAX_CURVES], lambda series: series.points[0].runs[0].workload)
            constant = "global batch" if kind == STRONG else "batch of each device"
            yield plot(
                f"{kind}_scaling", "scaling", f"{kind.capitalize()} scaling: the same {constant}",
                f"More devices with the same {constant}. Dotted: throughput in proportion to devices. A line "
                "joins runs that differ only in their devices." + drawn_of(groups, len(of_kind)),
                partial(_figure, groups),
            )  # fmt: skip


def _figure(groups: Sequence[Sequence[Series]]) -> Figure:
    """Draw a panel for each group of series with the same workload."""
    titles = titles_of_work([group[0].points[0].runs[0].run for group in groups], with_batch=False)
    figure, panels = canvas(*(3.4 for _ in groups), columns=2)
    drawn = [one_series for group in groups for one_series in group]
    for (rates, efficiencies), group, title in zip(panels, groups, titles, strict=True):
        name_panel(rates, title)
        _draw(rates, efficiencies, group, first=drawn.index(group[0]))
    handles = [Line2D([], [], **style(index)) for index in range(len(drawn))]
    ideal = Line2D([], [], color=ink(), **IDEAL)
    add_legend(figure, [*handles, ideal], [*legend(one_series.words for one_series in drawn), "ideal"])
    return figure


def _draw(rates: Axes, efficiencies: Axes, series: Sequence[Series], *, first: int) -> None:
    """Draw the series into two axes; `first`: the number of their first curve in the figure."""
    points = [point for one_series in series for point in one_series.points]
    ticks = sorted({point.devices for point in points})
    ideals = [one.points[0].samples_per_s * one.points[-1].devices / one.points[0].devices for one in series]
    speeds = [*ideals, *(point.samples_per_s for point in points)]
    logarithmic(rates.yaxis, speeds, name="throughput, samples/s")
    for index, one_series in enumerate(series, start=first):
        devices = [point.devices for point in one_series.points]
        per_device = one_series.points[0].samples_per_s / devices[0]
        rates.plot(devices, [point.samples_per_s for point in one_series.points], **style(index))
        colour = COLOURS[index % len(COLOURS)]
        rates.plot(devices, [per_device * count for count in devices], color=colour, **IDEAL)
        efficiencies.plot(devices, [100 * point.efficiency for point in one_series.points], **style(index))
    efficiencies.axhline(100, color=ink(), **IDEAL)
    efficiencies.set_ylim(bottom=0)
    efficiencies.set_ylabel(f"efficiency, % of {ticks[0]} device{'s' * (ticks[0] > 1)}")
    for axes in (rates, efficiencies):
        count_devices(axes, ticks)


def count_devices(axes: Axes, ticks: Sequence[int]) -> None:
    """Make the horizontal axis show the number of devices, with these ticks."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, labels=[str(tick) for tick in ticks])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("devices")
