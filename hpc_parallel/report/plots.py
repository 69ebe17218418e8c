"""The plots of a report and their captions."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from hpc_parallel.report import bubble, collective_curves, latency, link_heat_maps
from hpc_parallel.report.drawing import (
    BLUE,
    COLOURS,
    GREEN,
    HATCHES,
    MAX_CURVES,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    Plot,
    bar_chart,
    canvas,
    first_of,
    ink,
    plot,
    short,
    style,
)
from hpc_parallel.report.figures import number
from hpc_parallel.report.gather import PARTS, Row, timeline
from hpc_parallel.report.tables import STRONG, WEAK, Prediction, Series, Unit, digits, unit_of

MAX_BARS, MAX_TIMELINES, MAX_POINTS = 40, 12, 300
MAX_NUMBERS = 100  # microbatch numbers per rank: more have room only if their chunks overlap
KINDS = {  # kind of a stage's work -> colour, hatch, name
    "forward": (BLUE, "", "forward"),
    "loss": (PURPLE, "xx", "loss"),
    "backward": (ORANGE, "//", "backward"),
    "weights": (GREEN, "..", "gradients of weights"),
    "average": (SKY, "\\\\", "gradients out"),
}
PART_STYLES = {
    "compute": (BLUE, ""), "communication": (VERMILION, "//"), "bubble": (ORANGE, ".."),
    "data": (GREEN, "xx"), "other": (PURPLE, "\\\\"),
}  # fmt: skip


def draw(rows: Sequence[Row], *, series: Sequence[Series], predictions: Sequence[Prediction]) -> list[Plot]:
    """All plots for which these runs have figures."""
    return [
        *_scaling_plots(series),
        *_latency_plots(rows),
        *_parts_plots(rows),
        *_memory_plots(rows),
        *_bubble_plots(rows),
        *loss_plots(rows),
        *_timeline_plots(rows),
        *_prediction_plots(predictions),
        *collective_curves.plots(rows),
        *link_heat_maps.plots(rows),
    ]


def _scaling_plots(series: Sequence[Series]) -> Iterator[Plot]:
    for kind in (STRONG, WEAK):
        if of_kind := [one_series for one_series in series if one_series.kind == kind]:
            constant = "global batch" if kind == STRONG else "batch of each device"
            yield plot(
                f"{kind}_scaling", "scaling", f"{kind.capitalize()} scaling",
                f"More devices with the same {constant}. Dotted: throughput in proportion to devices.",
                partial(_scaling, of_kind),
            )  # fmt: skip


def _latency_plots(rows: Sequence[Row]) -> Iterator[Plot]:
    if curves := latency.curves(rows):
        yield plot(
            "latency", "latency", "Latency against throughput",
            "A point is a batch size of a run, with its number if there is room. It shows the median; the "
            "thin line ends at the 99th percentile. Better is down and to the right."
            + first_of(MAX_CURVES, len(curves)),
            lambda: latency.figure(curves[:MAX_CURVES]),
        )  # fmt: skip


def _parts_plots(rows: Sequence[Row]) -> Iterator[Plot]:
    if with_parts := [row for row in rows if row.parts is not None]:
        yield plot(
            "step_parts", "parts", "Where the time of a step goes",
            "Parts of a profiled step, mean over the ranks. Profiling makes the step longer.",
            lambda: _parts(with_parts[:MAX_BARS]),
        )  # fmt: skip


def _memory_plots(rows: Sequence[Row]) -> Iterator[Plot]:
    if measured := [row for row in rows if row.figures["peak_memory_bytes"] is not None]:
        yield plot(
            "memory", "memory", "Memory per device",
            "The maximum that any rank held: allocated on a GPU, resident (with the interpreter and its "
            "libraries) on a CPU.",
            lambda: _memory(measured[:MAX_BARS]),
        )  # fmt: skip


def _bubble_plots(rows: Sequence[Row]) -> Iterator[Plot]:
    if families := bubble.families(rows):
        yield plot(
            "bubble", "bubble", "Bubble against memory",
            "A point is a run with its number of microbatches. A line joins runs that differ only in this "
            "number. Hollow: the formula of the schedule, which is not a measurement. Better is down and to "
            "the left." + first_of(MAX_CURVES, len(families)),
            lambda: bubble.figure(families[:MAX_CURVES]),
        )  # fmt: skip


def loss_plots(rows: Sequence[Row]) -> Iterator[Plot]:
    """One plot of the losses of all runs that logged at least two."""
    if curves := [row for row in rows if len(_losses(row)) > 1]:
        yield plot(
            "loss", "loss", "Training loss",
            "Runs of the same configuration should coincide, whatever their layout.",
            lambda: _loss(curves[:MAX_CURVES]),
        )  # fmt: skip


def _timeline_plots(rows: Sequence[Row]) -> Iterator[Plot]:
    timelines = [(row, ranks) for row in rows if (ranks := timeline(row))]
    for index, (row, ranks) in enumerate(timelines[:MAX_TIMELINES], start=1):
        yield plot(
            f"timeline_{index}", "timeline", f"One step of {row.label}",
            "What the stages of each device did in one profiled step. Numbers are microbatches "
            "(stage:microbatch if a device has several stages). Blank is idle."
            + first_of(MAX_TIMELINES, len(timelines)),
            partial(_timeline, ranks),
        )  # fmt: skip


def _prediction_plots(predictions: Sequence[Prediction]) -> Iterator[Plot]:
    if with_ratio := [prediction for prediction in predictions if prediction.ratio is not None]:
        yield plot(
            "predicted", "predicted", "Measured divided by predicted",
            "1 is an exact prediction. Twice and half are equally far from it.",
            lambda: _ratios(with_ratio[:MAX_BARS]),
        )  # fmt: skip


def _scaling(series: Sequence[Series]) -> Figure:
    figure, (rates, efficiencies) = canvas(4.4, columns=2)
    shown = series[:MAX_CURVES]
    points = [point for curve in shown for point in curve.points]
    for index, curve in enumerate(shown):
        devices = [point.devices for point in curve.points]
        first = curve.points[0]
        rates.plot(
            devices, [point.samples_per_s for point in curve.points], label=short(curve.label), **style(index)
        )
        rates.plot(
            devices, [first.samples_per_s * n / first.devices for n in devices],
            color=COLOURS[index % len(COLOURS)], linestyle=(0, (1, 1.5)), linewidth=1,
        )  # fmt: skip
        efficiencies.plot(devices, [100 * point.efficiency for point in curve.points], **style(index))
    ticks = sorted({point.devices for point in points})
    efficiencies.axhline(100, color=ink(), linestyle=(0, (1, 1.5)), linewidth=1)
    efficiencies.annotate("ideal", (ticks[-1], 100), ha="right", va="bottom", fontsize=9)
    efficiencies.set_ylim(bottom=0)
    rates.set_yscale("log", base=2)
    for axes in (rates, efficiencies):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, labels=[str(tick) for tick in ticks])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("devices")
    samples_per_s = [point.samples_per_s for point in points]
    octaves = math.log2(max(samples_per_s) / min(samples_per_s))
    rates.yaxis.set_major_locator(LogLocator(2, subs=(1, 1.25, 1.5, 1.75) if octaves < 3 else (1,)))
    rates.yaxis.set_minor_locator(NullLocator())
    rates.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    rates.set_ylabel("throughput, samples/s")
    efficiencies.set_ylabel(f"efficiency, % of {ticks[0]} device{'s' * (ticks[0] > 1)}")
    handles, labels = rates.get_legend_handles_labels()
    handles.append(mpl.lines.Line2D([], [], color=ink(), linestyle=(0, (1, 1.5)), linewidth=1))
    figure.legend(handles, [*labels, "ideal"], loc="outside lower left", ncols=2, fontsize=9)
    return figure


def _parts(rows: Sequence[Row]) -> Figure:
    figure, axes = bar_chart(rows)
    parts = [row.parts or {} for row in rows]
    unit = unit_of("seconds", (sum(row_parts.values()) for row_parts in parts))
    left = [0.0] * len(rows)
    for part in PARTS:
        colour, hatch = PART_STYLES[part]
        widths = [row_parts[part] / unit.size for row_parts in parts]
        axes.barh(
            range(len(rows)), widths, left=left, height=0.7, color=colour, hatch=hatch, label=part,
            edgecolor=ink(), linewidth=0.4,
        )  # fmt: skip
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_xlabel(f"time of one step, {unit.name}")
    figure.legend(loc="outside upper left", ncols=len(PARTS), fontsize=9)
    return figure


def _memory(rows: Sequence[Row]) -> Figure:
    figure, axes = bar_chart(rows)
    unit = unit_of("bytes", (row.figures["peak_memory_bytes"] for row in rows))
    strategies = list(dict.fromkeys(row.strategy for row in rows))
    for y, row in enumerate(rows):
        index = strategies.index(row.strategy)
        value = row.figures["peak_memory_bytes"]
        assert value is not None
        axes.barh(
            y, value / unit.size, height=0.7, color=COLOURS[index % len(COLOURS)],
            hatch=HATCHES[index % len(HATCHES)], edgecolor=ink(), linewidth=0.4,
        )  # fmt: skip
        axes.annotate(
            unit.show(value), (value / unit.size, y), xytext=(4, 0), textcoords="offset points",
            va="center", fontsize=9,
        )  # fmt: skip
    axes.set_xlabel(f"memory per device, {unit.name}")
    return figure


def _losses(row: Row) -> list[tuple[float, float]]:
    """Samples consumed and loss, reduced to about MAX_POINTS points."""
    points = [
        (samples, loss)
        for line in row.run.metrics
        if (samples := number(line.get("samples"))) is not None
        and (loss := number(line.get("loss"))) is not None
    ]
    stride = max(1, len(points) // MAX_POINTS)
    return points[::stride] + points[-1:] * bool(len(points) % stride != 1 and stride > 1)


def _loss(rows: Sequence[Row]) -> Figure:
    figure, axes = canvas(4.4)
    for index, row in enumerate(rows):
        samples, losses = zip(*_losses(row), strict=True)
        spacing = max(1, len(samples) // 8)
        axes.plot(
            samples, losses, label=short(row.label), markevery=(index % spacing, spacing), markersize=5,
            linewidth=1.3, **style(index),
        )  # fmt: skip
    axes.set_xlabel("samples consumed")
    axes.set_ylabel("training loss")
    figure.legend(loc="outside lower left", ncols=2, fontsize=9)
    return figure


def _timeline(ranks: Sequence[dict[str, Any]]) -> Figure:
    figure, axes = canvas(1.3 + 0.42 * len(ranks))
    length_s = max(float(rank["length_s"]) for rank in ranks)
    unit = unit_of("seconds", [length_s])
    stages = [sorted({stage for _, _, stage, _, _ in rank["chunks"]}) for rank in ranks]
    with_stage = any(len(rank_stages) > 1 for rank_stages in stages)
    for y, rank in enumerate(ranks):
        _draw_chunks(axes, rank["chunks"], y=y, unit=unit)
        _draw_microbatches(axes, rank["chunks"], y=y, unit=unit, length_s=length_s, with_stage=with_stage)
    labels = [
        short(f"rank {rank['rank']}, stage {' '.join(map(str, rank_stages))}")
        for rank, rank_stages in zip(ranks, stages, strict=True)
    ]
    axes.set_yticks(range(len(ranks)), labels=labels)
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_xlim(0, length_s / unit.size)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"time since the step's start, {unit.name}")
    chunks = [chunk for rank in ranks for chunk in rank["chunks"]]
    visible = {_known_kind(kind) for start, end, _, kind, _ in chunks if end - start > length_s / 200}
    styles = [KINDS[kind] for kind in KINDS if kind in visible]
    handles = [
        Patch(facecolor=colour, hatch=hatch, edgecolor=ink(), linewidth=0.4) for colour, hatch, _ in styles
    ]
    names = [name for _, _, name in styles]
    figure.legend(handles, names, loc="outside upper left", ncols=len(names) or 1, fontsize=9)
    return figure


def _known_kind(kind: str) -> str:
    return kind if kind in KINDS else "average"


def _draw_chunks(axes: Axes, chunks: Sequence[Any], *, y: int, unit: Unit) -> None:
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for start, end, _, kind, _ in chunks:
        spans[_known_kind(kind)].append((start / unit.size, (end - start) / unit.size))
    for kind, of_kind in spans.items():
        colour, hatch, _ = KINDS[kind]
        axes.broken_barh(
            of_kind, (y - 0.38, 0.76), facecolor=colour, edgecolor=ink(), linewidth=0.4, hatch=hatch
        )


def _draw_microbatches(
    axes: Axes, chunks: Sequence[Any], *, y: int, unit: Unit, length_s: float, with_stage: bool
) -> None:
    """Write the number of the microbatch on every chunk that has room, up to MAX_NUMBERS."""
    count = 0
    for start, end, stage, _, microbatch in chunks:
        text = "" if microbatch is None else f"{stage}:{microbatch}" if with_stage else f"{microbatch}"
        if (end - start) / length_s > 0.011 * (len(text) + 0.4) and count < MAX_NUMBERS:
            count += 1
            axes.annotate(
                text, ((start + end) / 2 / unit.size, y), ha="center", va="center", fontsize=8,
                color="black", bbox={"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 0.6},
            )  # fmt: skip


def _ratios(predictions: Sequence[Prediction]) -> Figure:
    figure, axes = canvas(1.1 + 0.36 * len(predictions))
    ratios = [prediction.ratio or 1.0 for prediction in predictions]
    colours = [VERMILION if ratio > 1 else BLUE for ratio in ratios]
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
    axes.set_xscale("log", base=2)
    reach = max(max(ratios), 1 / min(ratios), 2)
    axes.set_xlim(1 / reach / 1.2, reach * 1.2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: digits(value, 2)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.axvline(1, color=ink(), linewidth=1)
    labels = [short(f"{prediction.row.label}: {prediction.key}") for prediction in predictions]
    axes.set_yticks(range(len(labels)), labels=labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("measured / predicted")
    return figure
