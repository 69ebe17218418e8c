"""Throughput and efficiency by the number of devices, beside the ideal, with a panel for each workload."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpc_parallel.report import picture
from hpc_parallel.report.labels import legend, titles_of_work
from hpc_parallel.report.tables import STRONG, WEAK, Series

DOTTED = {"linestyle": (0, (1, 1.5)), "linewidth": 1}
DevicePoint = tuple[int, float, float]  # number of devices, rate in any unit, efficiency


def pictures(series: Sequence[Series]) -> Iterator[picture.Picture]:
    """A plot of strong scaling and one of weak scaling."""
    for kind in (STRONG, WEAK):
        if of_kind := [one_series for one_series in series if one_series.kind == kind]:
            groups = picture.panels_of(
                of_kind[: picture.MAX_CURVES], lambda series: series.points[0].runs[0].workload
            )
            constant = "global batch" if kind == STRONG else "batch of each device"
            yield picture.Picture(
                f"{kind}_scaling", "scaling", f"{kind.capitalize()} scaling: the same {constant}",
                f"More devices with the same {constant}. Dotted: throughput in proportion to devices. A line "
                "joins runs that differ only in their devices."
                + picture.first_of(sum(map(len, groups)), len(of_kind)),
                _graphs(groups),
            )  # fmt: skip


def _graphs(groups: Sequence[Sequence[Series]]) -> picture.Graphs:
    """A panel for each group of series with the same workload."""
    titles = titles_of_work([group[0].points[0].runs[0].run for group in groups], with_batch=False)
    numbered = enumerate(legend(one_series.words for group in groups for one_series in group))
    panels = []
    for group, title in zip(groups, titles, strict=True):
        curves = [
            (*next(numbered), [(at.devices, at.samples_per_s, at.efficiency) for at in one_series.points])
            for one_series in group
        ]
        panels.append((title, panel(curves, rate="throughput, samples/s")))
    return graphs(panels)


def graphs(panels: Sequence[tuple[str, Sequence[picture.Graph]]]) -> picture.Graphs:
    """These panels of scaling, with the ideal in the legend."""
    return picture.Graphs(panels, 3.4, [picture.Curve((), {**DOTTED, "color": picture.INK}, "ideal")])


def panel(curves: Sequence[tuple[int, str, Sequence[DevicePoint]]], *, rate: str) -> list[picture.Graph]:
    """Rates and efficiencies over devices. curves: number in the figure, text of the legend and points."""
    rates, efficiencies = [], []
    for index, text, points in curves:
        first, first_rate, _ = points[0]
        look = picture.style(index)
        ideal = [(devices, first_rate * devices / first) for devices, _, _ in points]
        rates.append(picture.Curve([(devices, speed) for devices, speed, _ in points], look, text))
        rates.append(picture.Curve(ideal, {**DOTTED, "color": look["color"]}))
        efficiencies.append(picture.Curve([(devices, 100 * share) for devices, _, share in points], look))
    fewest = min(points[0][0] for _, _, points in curves)
    across = picture.PlotAxis("devices", picture.COUNTS)
    up = picture.PlotAxis(f"efficiency, % of {fewest} device{'s' * (fewest > 1)}", picture.FROM_ZERO)
    return [
        picture.Graph(across, picture.PlotAxis(rate, picture.LOGARITHMIC), rates),
        picture.Graph(across, up, efficiencies, level=100),
    ]
