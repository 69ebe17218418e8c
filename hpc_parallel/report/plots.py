"""The plots of a report: which there are, and what each shows."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from hpc_parallel.report import bubble, latency
from hpc_parallel.report.drawing import (
    BLUE,
    COLOURS,
    GREEN,
    HATCHES,
    MOST_CURVES,
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
from hpc_parallel.report.gather import PARTS, Row, number, timeline
from hpc_parallel.report.tables import STRONG, WEAK, Prediction, Series, digits, unit_of

MOST_BARS, MOST_TIMELINES, MOST_POINTS = 40, 12, 300
MOST_WORDS = 100  # in a rank's line: more have no room, unless what they name lies in the same place
KINDS = {  # of a stage's work: colour, hatch, name
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
    """All plots that these runs have figures for."""
    plots = []
    for kind in (STRONG, WEAK):
        if found := [each for each in series if each.kind == kind]:
            held = "the global batch stays" if kind == STRONG else "the batch of a device stays"
            plots.append(
                plot(
                    f"{kind}_scaling", "scaling", f"{kind.capitalize()} scaling",
                    f"More devices, and {held} the same. Dotted: as many times the throughput as devices.",
                    partial(_scaling, found),
                )
            )  # fmt: skip
    if timed := latency.curves(rows):
        plots.append(
            plot(
                "latency", "latency", "Latency against throughput",
                "Of each run by batch size, which stands at the points where there is room: the median, and "
                "by a thin line up to the 99th percentile. Better is down and to the right."
                + first_of(MOST_CURVES, len(timed)),
                lambda: latency.figure(timed[:MOST_CURVES]),
            )
        )  # fmt: skip
    if parted := [row for row in rows if row.parts is not None]:
        plots.append(
            plot(
                "step_parts", "parts", "Where the time of a step goes",
                "Of a watched step, mean over the ranks; watching makes it longer than an ordinary one.",
                lambda: _parts(parted[:MOST_BARS]),
            )
        )  # fmt: skip
    if measured := [row for row in rows if row.figures["peak_memory_bytes"] is not None]:
        plots.append(
            plot(
                "memory", "memory", "Memory per device",
                "The most that any rank held at once: allocated on a GPU, resident (with the interpreter and "
                "its libraries) on a CPU.",
                lambda: _memory(measured[:MOST_BARS]),
            )
        )  # fmt: skip
    if families := bubble.families(rows):
        plots.append(
            plot(
                "bubble", "bubble", "Bubble against memory",
                "A point is a run, its number that of its microbatches; a line joins runs that differ in "
                "nothing else. Hollow: what the formula of its schedule says of it, which was not measured. "
                "Better is down and to the left." + first_of(MOST_CURVES, len(families)),
                lambda: bubble.figure(families[:MOST_CURVES]),
            )
        )  # fmt: skip
    if curves := [row for row in rows if len(_losses(row)) > 1]:
        plots.append(
            plot(
                "loss", "loss", "Training loss",
                "Runs of the same configuration should lie on each other, whatever their layout.",
                lambda: _loss(curves[:MOST_CURVES]),
            )
        )  # fmt: skip
    charts = [(row, ranks) for row in rows if (ranks := timeline(row))]
    for number_, (row, ranks) in enumerate(charts[:MOST_TIMELINES], start=1):
        plots.append(
            plot(
                f"timeline_{number_}", "timeline", f"One step of {row.label}",
                "What each device's stages did when, in one watched step; numbers are microbatches "
                "(stage:microbatch where a device has several stages). Blank is idle."
                + first_of(MOST_TIMELINES, len(charts)),
                partial(_timeline, ranks),
            )
        )  # fmt: skip
    if ratios := [each for each in predictions if each.ratio is not None]:
        plots.append(
            plot(
                "predicted", "predicted", "Measured by predicted",
                "1 is a prediction that came true; twice as much and half as much are as far from it.",
                lambda: _ratios(ratios[:MOST_BARS]),
            )
        )  # fmt: skip
    return plots


def _scaling(series: Sequence[Series]) -> Figure:
    figure, (rates, efficiencies) = canvas(4.4, columns=2)
    shown = series[:MOST_CURVES]
    for place, each in enumerate(shown):
        devices = [point.devices for point in each.points]
        first = each.points[0]
        rates.plot(
            devices, [point.samples_per_s for point in each.points], label=short(each.label), **style(place)
        )
        rates.plot(
            devices, [first.samples_per_s * n / first.devices for n in devices],
            color=COLOURS[place % len(COLOURS)], linestyle=(0, (1, 1.5)), linewidth=1,
        )  # fmt: skip
        efficiencies.plot(devices, [100 * point.efficiency for point in each.points], **style(place))
    ticks = sorted({point.devices for each in shown for point in each.points})
    efficiencies.axhline(100, color=ink(), linestyle=(0, (1, 1.5)), linewidth=1)
    efficiencies.annotate("ideal", (ticks[-1], 100), ha="right", va="bottom", fontsize=9)
    efficiencies.set_ylim(bottom=0)
    rates.set_yscale("log", base=2)
    for axes in (rates, efficiencies):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, labels=[str(tick) for tick in ticks])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("devices")
    reached = [point.samples_per_s for each in shown for point in each.points]
    octaves = math.log2(max(reached) / min(reached))
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
    unit = unit_of("seconds", (sum(each.values()) for each in parts))
    left = [0.0] * len(rows)
    for part in PARTS:
        colour, hatch = PART_STYLES[part]
        widths = [each[part] / unit.size for each in parts]
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
    for place, row in enumerate(rows):
        kind = strategies.index(row.strategy)
        value = row.figures["peak_memory_bytes"]
        assert value is not None
        axes.barh(
            place, value / unit.size, height=0.7, color=COLOURS[kind % len(COLOURS)],
            hatch=HATCHES[kind % len(HATCHES)], edgecolor=ink(), linewidth=0.4,
        )  # fmt: skip
        axes.annotate(
            unit.show(value), (value / unit.size, place), xytext=(4, 0), textcoords="offset points",
            va="center", fontsize=9,
        )  # fmt: skip
    axes.set_xlabel(f"memory per device, {unit.name}")
    return figure


def _losses(row: Row) -> list[tuple[float, float]]:
    """Samples consumed and loss, at most so many that a curve needs."""
    points = [
        (samples, loss)
        for line in row.run.metrics
        if (samples := number(line.get("samples"))) is not None
        and (loss := number(line.get("loss"))) is not None
    ]
    every = max(1, len(points) // MOST_POINTS)
    return points[::every] + points[-1:] * bool(len(points) % every != 1 and every > 1)


def _loss(rows: Sequence[Row]) -> Figure:
    figure, axes = canvas(4.4)
    for place, row in enumerate(rows):
        samples, losses = zip(*_losses(row), strict=True)
        apart = max(1, len(samples) // 8)
        axes.plot(
            samples, losses, label=short(row.label), markevery=(place % apart, apart), markersize=5,
            linewidth=1.3, **style(place),
        )  # fmt: skip
    axes.set_xlabel("samples consumed")
    axes.set_ylabel("training loss")
    figure.legend(loc="outside lower left", ncols=2, fontsize=9)
    return figure


def _timeline(ranks: Sequence[dict[str, Any]]) -> Figure:
    figure, axes = canvas(1.3 + 0.42 * len(ranks))
    length = max(float(rank["length_s"]) for rank in ranks)
    unit = unit_of("seconds", [length])
    several = any(len({stage for _, _, stage, _, _ in rank["chunks"]}) > 1 for rank in ranks)
    seen: dict[str, Patch] = {}
    for place, rank in enumerate(ranks):
        bars: dict[str, list[tuple[float, float]]] = defaultdict(list)
        words = 0
        for start, end, stage, kind, microbatch in rank["chunks"]:
            kind = kind if kind in KINDS else "average"
            bars[kind].append((start / unit.size, (end - start) / unit.size))
            if end - start > length / 200:  # what is to be seen
                colour, hatch, name = KINDS[kind]
                seen[name] = Patch(facecolor=colour, hatch=hatch, edgecolor=ink(), linewidth=0.4)
            text = "" if microbatch is None else f"{stage}:{microbatch}" if several else f"{microbatch}"
            if (end - start) / length > 0.011 * (len(text) + 0.4) and words < MOST_WORDS:
                words += 1
                axes.annotate(
                    text, ((start + end) / 2 / unit.size, place), ha="center", va="center", fontsize=8,
                    color="black", bbox={"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 0.6},
                )  # fmt: skip
        for kind, spans in bars.items():
            colour, hatch, _ = KINDS[kind]
            axes.broken_barh(
                spans, (place - 0.38, 0.76), facecolor=colour, edgecolor=ink(), linewidth=0.4, hatch=hatch
            )
    stages = [sorted({stage for _, _, stage, _, _ in rank["chunks"]}) for rank in ranks]
    labels = [
        short(f"rank {rank['rank']}, stage {' '.join(map(str, held))}")
        for rank, held in zip(ranks, stages, strict=True)
    ]
    axes.set_yticks(range(len(ranks)), labels=labels)
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_xlim(0, length / unit.size)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"time since the step's start, {unit.name}")
    named = [name for _, _, name in KINDS.values() if name in seen]
    handles = [seen[name] for name in named]
    figure.legend(handles, named, loc="outside upper left", ncols=len(named) or 1, fontsize=9)
    return figure


def _ratios(found: Sequence[Prediction]) -> Figure:
    figure, axes = canvas(1.1 + 0.36 * len(found))
    ratios = [each.ratio or 1.0 for each in found]
    colours = [VERMILION if ratio > 1 else BLUE for ratio in ratios]
    bars = axes.barh(
        range(len(found)), [ratio - 1 for ratio in ratios], left=1, height=0.7, color=colours,
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
    axes.set_yticks(range(len(found)), labels=[short(f"{each.row.label}: {each.key}") for each in found])
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("measured / predicted")
    return figure
