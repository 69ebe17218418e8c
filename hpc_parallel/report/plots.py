"""The plots of a report and their captions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from matplotlib.figure import Figure

from hpc_parallel.report import (
    bubble,
    collective_plots,
    latency_curves,
    link_heat_maps,
    loss_curves,
    memory_bars,
    scaling_curves,
    timeline_drawing,
)
from hpc_parallel.report.drawing import (
    BLUE,
    GREEN,
    MAX_BARS,
    MAX_CURVES,
    ORANGE,
    PURPLE,
    VERMILION,
    Plot,
    WorkKind,
    add_patch_legend,
    bar_chart,
    bar_style,
    canvas,
    drawn_of,
    first_of,
    ink,
    kinds,
    logarithmic,
    name_bars,
    plot,
)
from hpc_parallel.report.gather import Row
from hpc_parallel.report.labels import legend
from hpc_parallel.report.predictions import Prediction
from hpc_parallel.report.tables import Series, digits, parts_of, unit_of

PART_STYLES = {
    "compute": (BLUE, ""), "communication": (VERMILION, "//"), "bubble": (ORANGE, ".."),
    "data": (GREEN, "xx"), "other": (PURPLE, "\\\\"),
}  # fmt: skip


def draw(rows: Sequence[Row], *, series: Sequence[Series], predictions: Sequence[Prediction]) -> list[Plot]:
    """All plots for which these runs have figures."""
    return [
        *scaling_curves.plots(series),
        *latency_curves.plots(rows),
        *_parts_plots(rows),
        *memory_bars.plots(rows),
        *_bubble_plots(rows),
        *loss_curves.plots(rows),
        *timeline_drawing.plots(rows),
        *_prediction_plots(predictions),
        *collective_plots.plots(rows),
        *link_heat_maps.plots(rows),
    ]


def _parts_plots(rows: Sequence[Row]) -> Iterator[Plot]:
    if with_parts := [row for row in rows if row.parts is not None]:
        of_kinds = kinds(with_parts, most=MAX_BARS)
        yield plot(
            "step_parts", "parts", "Where the time of a step goes",
            "Parts of a profiled step, mean over the ranks. Profiling makes the step longer."
            + drawn_of((kind.rows for kind in of_kinds), len(with_parts)),
            partial(_parts, of_kinds),
        )  # fmt: skip


def _bubble_plots(rows: Sequence[Row]) -> Iterator[Plot]:
    if families := bubble.families(rows):
        by_memory = bubble.have_memory(families)
        yield plot(
            "bubble", "bubble", f"Bubble of pipelines, by {'memory' if by_memory else 'microbatches'}",
            "A point is a run with its number of microbatches. A line joins runs that differ only in this "
            "number. Hollow: the formula of the schedule, which is not a measurement. Better is down"
            + " and to the left" * by_memory + "." + first_of(MAX_CURVES, len(families)),
            lambda: bubble.figure(families[:MAX_CURVES]),
        )  # fmt: skip


def _prediction_plots(predictions: Sequence[Prediction]) -> Iterator[Plot]:
    if with_ratio := [prediction for prediction in predictions if prediction.ratio is not None]:
        yield plot(
            "predicted", "predicted", "Measured divided by predicted",
            "1 is an exact prediction. Twice and half are equally far from it."
            + first_of(MAX_BARS, len(with_ratio)),
            lambda: _ratios(with_ratio[:MAX_BARS]),
        )  # fmt: skip


def _parts(of_kinds: Sequence[WorkKind]) -> Figure:
    figure, panels = bar_chart(of_kinds)
    rows = [row for kind in of_kinds for row in kind.rows]
    unit = unit_of("seconds", (sum((row.parts or {}).values()) for row in rows))
    parts = parts_of(rows)
    for axes, kind in zip(panels, of_kinds, strict=True):
        left = [0.0] * len(kind.rows)
        for part in parts:
            widths = [(row.parts or {})[part] / unit.size for row in kind.rows]
            axes.barh(range(len(widths)), widths, left=left, height=0.7, **bar_style(*PART_STYLES[part]))
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axes.set_xlabel(f"time of one step, {unit.name}")
    add_patch_legend(figure, (PART_STYLES[part] for part in parts), parts)
    return figure


def _ratios(predictions: Sequence[Prediction]) -> Figure:
    figure, ((axes,),) = canvas(0.7 + 0.36 * len(predictions))
    ratios = [prediction.ratio or 1.0 for prediction in predictions]
    colours = [VERMILION if ratio > 1 else BLUE for ratio in ratios]
    reach = max(max(ratios), 1 / min(ratios), 2)
    logarithmic(axes.xaxis, (1 / reach, reach), name="measured / predicted")
    bars = axes.barh(
        range(len(ratios)), [ratio - 1 for ratio in ratios], left=1, height=0.7, color=colours,
        edgecolor=ink(), linewidth=0.4,
    )  # fmt: skip
    for bar, ratio in zip(bars, ratios, strict=True):
        bar.set_hatch("//" if ratio > 1 else "")
        axes.annotate(
            digits(ratio, 3), (max(1, ratio), bar.get_y() + 0.35), xytext=(4, 0), textcoords="offset points",
            va="center", fontsize=9,
        )  # fmt: skip
    axes.set_xlim(1 / reach / 1.2, reach * 1.4)
    axes.axvline(1, color=ink(), linewidth=1)
    name_bars(axes, legend((*prediction.row.names.words, prediction.title) for prediction in predictions))
    return figure
