"""Draw the pictures of a report with matplotlib: as SVG for wide and narrow screens, and as PNG.

The text in an SVG has the text colour of the page. matplotlib is an extra and is imported with this module.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis, XAxis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from hpc_parallel.report.labels import ROOM, short
from hpc_parallel.report.picture import (
    COUNTS,
    FROM_ZERO,
    INK,
    LINEAR,
    LOGARITHMIC,
    SIZES,
    Bar,
    Bars,
    Curve,
    Fill,
    Graph,
    Graphs,
    HeatMap,
    Look,
    Picture,
    PlotAxis,
)

WIDTH, NARROW = 9.0, 4.3  # width in inches of a plot, and of the same plot on a phone
PAGE_INK = "#0a0b0c"  # placeholder for the text colour of the page
PNG = {"text.color": "black", "axes.labelcolor": "black", "axes.edgecolor": "black", "xtick.color": "black",
       "ytick.color": "black", "hatch.color": "black", "figure.facecolor": "white"}  # fmt: skip
SVG = {**dict.fromkeys(PNG, PAGE_INK), "figure.facecolor": "none", "svg.fonttype": "none"}
COMMON = {
    "font.family": "DejaVu Sans", "font.size": 10, "axes.facecolor": "none", "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25, "grid.color": "#808080",
    "text.parse_math": False,  # a name may contain dollar signs
    "figure.figsize": (WIDTH, WIDTH), "legend.frameon": False, "hatch.linewidth": 0.6,
    "axes.titlesize": 11, "axes.axisbelow": True,
}  # fmt: skip
TITLE_SIZE, CHARACTERS_PER_INCH = 11.5, 10
STEPS = (1, 2, 5, 10)  # between the ticks of an axis
MAX_TEXTS = 100  # on the blocks of a bar; more have room only if blocks overlap
MOST_NUMBERS = 12  # names of a heat map whose cells show their values
MAX_NOTES = 300  # each note is compared with all notes before it
NOTE_SIZE = 8.0  # font size of a note, points
# Offsets in points from a marker to the nearer lower corner of its note.
NOTE_OFFSETS = ((6, 4), (-6, 4), (6, -11), (-6, -11))


@dataclass(frozen=True)
class Plot:
    """A picture in all formats."""

    picture: Picture
    svg: str  # an element for the page
    narrow_svg: str  # the same for a narrow page
    png: bytes


def draw(picture: Picture) -> Plot:
    with mpl.rc_context({**COMMON, **PNG}):
        png = io.BytesIO()
        figure_of(picture).savefig(png, format="png", dpi=144, bbox_inches="tight")
    wide, narrow = (_svg(picture, width=width) for width in (WIDTH, NARROW))
    return Plot(picture, wide, narrow, png.getvalue())


def _svg(picture: Picture, *, width: float) -> str:
    size = {"figure.figsize": (width, width)}
    with mpl.rc_context({**COMMON, **SVG, **size, "svg.hashsalt": f"{picture.name} {width}"}):
        svg = io.StringIO()
        metadata = {"Date": None, "Creator": None}
        figure_of(picture).savefig(svg, format="svg", bbox_inches="tight", metadata=metadata)
    return _inline(svg.getvalue(), picture.title)


def figure_of(picture: Picture) -> Figure:
    """The figure in the current width and colours of matplotlib, with the title above it."""
    content = picture.content
    if isinstance(content, Graphs):
        figure = _draw_graphs(content)
    elif isinstance(content, Bars):
        figure = _draw_bars(content)
    else:
        figure = _draw_heat_map(content)
    text = fill(picture.title, int(CHARACTERS_PER_INCH * figure.get_figwidth()))
    figure.set_figheight(figure.get_figheight() + 0.2 * text.count("\n"))
    figure.suptitle(text, x=0.01, ha="left", fontsize=TITLE_SIZE)
    return figure


def _inline(svg: str, title: str) -> str:
    """The SVG element in the text colour of the page. Group ids are removed: all plots have the same ids."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'<g id="[^"]*">', "<g>", body).replace(PAGE_INK, "currentColor")
    return body.replace("<svg ", f'<svg role="img" aria-label="{html.escape(title)}" ', 1)


def canvas(*heights: float, columns: int = 1) -> tuple[Figure, list[list[Axes]]]:
    """A figure with one panel below the other, of these heights in inches.

    Each panel has `columns` axes side by side, or below each other if the figure is narrow. The width is the
    current one of matplotlib. All ticks are 1, 2 or 5 times a power of ten.
    """
    down = 1 if is_wide() else columns
    ratios = [height for height in heights for _ in range(down)]
    width = mpl.rcParams["figure.figsize"][0]
    figure = Figure(figsize=(width, sum(ratios) + 0.4), layout="constrained")
    grid = figure.subplots(len(ratios), columns // down, squeeze=False, height_ratios=ratios)
    for axes in grid.flat:
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(nbins=8 if is_wide() else 4, steps=STEPS))
    panels = list(grid.flat)
    return figure, [panels[index : index + columns] for index in range(0, len(panels), columns)]


def is_wide() -> bool:
    """Whether the figure that is being drawn is for a wide screen."""
    return bool(mpl.rcParams["figure.figsize"][0] > NARROW)


def _draw_graphs(content: Graphs) -> Figure:
    figure, panels = canvas(*(content.height for _ in content.panels), columns=len(content.panels[0][1]))
    drawn: list[tuple[Axes, Graph]] = []
    below: list[Curve] = []  # in the legend below all panels
    for across, (title, graphs) in zip(panels, content.panels, strict=True):
        name_panel(across[0], title)
        drawn += zip(across, graphs, strict=True)
        for axes, graph in zip(across, graphs, strict=True):
            _draw_graph(axes, graph)
            named = [curve for curve in graph.curves if curve.text]
            if content.own_legends:
                axes.legend(*_entries(named), fontsize=8, loc="upper right")
            else:
                below += named
    if below := [*below, *content.more]:
        add_legend(figure, *_entries(below))
    for axes, graph in drawn:
        annotate(figure, axes, graph.curves)
    return figure


def _draw_graph(axes: Axes, graph: Graph) -> None:
    across: list[float] = []
    up: list[float] = []
    for curve in graph.curves:
        x, y = [x for x, _ in curve.points], [y for _, y in curve.points]
        if curve.tops:
            axes.vlines(x, y, curve.tops, color=curve.look["color"], linewidth=0.8, alpha=0.6)
        axes.plot(x, y, **_inked(curve.look))
        across += x
        up += [*y, *curve.tops]
    if graph.level is not None:
        axes.axhline(graph.level, color=ink(), linestyle=(0, (1, 1.5)), linewidth=1)
    _apply(graph.x, axes.xaxis, across)
    _apply(graph.y, axes.yaxis, up)


def _entries(curves: Sequence[Curve]) -> tuple[list[Line2D], list[str]]:
    """The lines and the texts of a legend."""
    return [Line2D([], [], **_inked(curve.look)) for curve in curves], [curve.text for curve in curves]


def _inked(look: Look) -> dict[str, Any]:
    return {**look, "color": ink()} if look["color"] == INK else dict(look)


def _draw_bars(content: Bars) -> Figure:
    figure, panels = canvas(*(1.0 + 0.36 * len(bars) for _, bars in content.panels))
    for (axes,), (title, bars) in zip(panels, content.panels, strict=True):
        name_bars(axes, [bar.name for bar in bars])
        name_panel(axes, title)
        for y, bar in enumerate(bars):
            _draw_bar(axes, bar, y)
        _apply(content.scale, axes.xaxis, content.scale.values)
        for y, bar in enumerate(bars):
            _write_texts(axes, bar, y)
        if content.marked is not None:
            place, dashes = content.marked
            axes.axvline(place, color=ink(), linewidth=1.5, linestyle=dashes)
    drawn = {block.fill for _, bars in content.panels for bar in bars for block in bar.blocks}
    if looks := [look for look in content.fills if look in drawn]:
        add_legend(figure, [Patch(**_bar_style(look)) for look in looks], [text for _, _, text in looks])
    return figure


def _draw_bar(axes: Axes, bar: Bar, y: int) -> None:
    for look in dict.fromkeys(block.fill for block in bar.blocks):
        spans = [(block.start, block.end - block.start) for block in bar.blocks if block.fill == look]
        axes.broken_barh(spans, (y - 0.35, 0.7), **_bar_style(look))
    if bar.note:
        axes.annotate(
            bar.note, (max((block.end for block in bar.blocks), default=0), y), xytext=(4, 0),
            textcoords="offset points", va="center", fontsize=9,
        )  # fmt: skip


def _write_texts(axes: Axes, bar: Bar, y: int) -> None:
    """Write the text of each block that has room, up to MAX_TEXTS."""
    low, high = axes.get_xlim()
    count, character = 0, 0.011 if is_wide() else 0.03  # a character's width, as a share of the axis
    for block in bar.blocks:
        room = (block.end - block.start) / (high - low)
        if block.text and room > character * (len(block.text) + 0.4) and count < MAX_TEXTS:
            count += 1
            axes.annotate(
                block.text, ((block.start + block.end) / 2, y), ha="center", va="center", fontsize=8,
                color="black", bbox={"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 0.6},
            )  # fmt: skip


def _draw_heat_map(content: HeatMap) -> Figure:
    width = WIDTH * 0.7 if is_wide() else NARROW
    figure = Figure(figsize=(width, width * 0.86), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(content.table, cmap="cividis", vmin=0)
    axes.grid(visible=False)
    axes.set_xticks(range(len(content.names)), labels=content.names, rotation=90)
    axes.set_yticks(range(len(content.names)), labels=content.names)
    values = [(a, b, value) for a, row in enumerate(content.table) for b, value in enumerate(row)
              if not math.isnan(value)]  # fmt: skip
    middle = max(value for _, _, value in values) / 2
    for a, b, value in values if len(content.names) <= MOST_NUMBERS else ():
        colour = "black" if value > middle else "white"
        axes.annotate(f"{value:.3g}", (b, a), ha="center", va="center", fontsize=9, color=colour)
    figure.colorbar(image, label=content.unit)
    return figure


def add_legend(figure: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Add a legend below the axes, in columns if there is room, and make the figure taller by its height."""
    short_labels = max(map(len, labels), default=0) <= ROOM
    columns = (4 if max(map(len, labels), default=0) <= 18 else 2) if is_wide() and short_labels else 1
    line = ROOM if not is_wide() else 2 * ROOM
    texts = [fill(label, line) for label in labels]
    lines = sum(1 + text.count("\n") for text in texts)
    figure.set_figheight(figure.get_figheight() + 0.2 * math.ceil(lines / columns))
    figure.legend(handles, texts, loc="outside lower left", ncols=columns, fontsize=9)


def ink() -> str:
    """The current text colour."""
    return str(mpl.rcParams["text.color"])


def _bar_style(look: Fill) -> dict[str, Any]:
    """The look of a bar, and of its patch in a legend."""
    return {"facecolor": look[0], "hatch": look[1], "edgecolor": ink(), "linewidth": 0.4}


def name_panel(axes: Axes, title: str) -> None:
    """Write the title of a kind of work above its panel."""
    text = short(title, 2 * ROOM)
    axes.set_title(text if is_wide() else fill(text, ROOM), loc="left", fontsize=10 if is_wide() else 8)


def name_bars(axes: Axes, labels: Sequence[str]) -> None:
    """Name the bars at 0, 1, ... from top to bottom."""
    axes.set_yticks(range(len(labels)), labels=[label if is_wide() else fill(label, 20) for label in labels])
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0, labelsize=10 if is_wide() else 8)


def _apply(scale: PlotAxis, axis: Axis, values: Sequence[float]) -> None:
    """Label the axis and set its limits and ticks.

    A narrow SPREAD becomes linear with margins of 5 % of the largest value, so that nearly equal values look
    close.
    """
    axis.set_label_text(scale.name)
    across, axes = isinstance(axis, XAxis), axis.axes
    if scale.kind == LINEAR:
        if across:
            axes.margins(x=0.02)
    elif scale.kind == FROM_ZERO:
        (axes.set_xlim if across else axes.set_ylim)(0, *scale.values)
    elif scale.kind in (SIZES, COUNTS):
        _double(axes, scale, values)
    elif scale.kind == LOGARITHMIC or max(values) > 5 * min(values):
        _logarithmic(axis, values)
    else:
        margin = 0.05 * max(values)
        (axes.set_xlim if across else axes.set_ylim)(min(values) - margin, max(values) + margin)


def _double(axes: Axes, scale: PlotAxis, values: Sequence[float]) -> None:
    axes.set_xscale("log", base=2)
    if scale.kind == COUNTS:
        axes.set_xticks(ticks := sorted(set(values)), labels=list(map(str, ticks)))
    else:
        axes.xaxis.set_major_locator(LogLocator(2, numticks=6 if is_wide() else 5))  # the texts are long
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: scale.text(value)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())


def _logarithmic(axis: Axis, values: Sequence[float]) -> None:
    """Make the axis logarithmic, with ticks of 1, 2 and 5 times a power of ten.

    values: positive. The axis spans at least a factor of five, so that it has ticks and nearly equal values
    look close.
    """
    across = isinstance(axis, XAxis)
    (axis.axes.set_xscale if across else axis.axes.set_yscale)("log")
    low, high = min(values), max(values)
    widen = max(1.15, math.sqrt(5 * low / high))
    (axis.axes.set_xlim if across else axis.axes.set_ylim)(low / widen, high * widen)
    decades = math.log10(high / low)
    axis.set_major_locator(LogLocator(subs=STEPS[:3] if decades < (4 if is_wide() else 2) else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.12g}"))
    axis.set_minor_locator(NullLocator())


def annotate(figure: Figure, axes: Axes, curves: Sequence[Curve]) -> None:
    """Write each note where it covers no marker and no other note, or omit it if there is no room.

    The notes at the ends of the curves are placed first. The widths of notes are estimated, because a backend
    measures them only at the end.
    """
    points = [list(zip(curve.points, curve.notes, strict=True)) for curve in curves if curve.notes]
    ends = [point for of_curve in points for point in (of_curve[:1] + of_curve[1:][-1:])]
    notes = [*ends, *(point for of_curve in points for point in of_curve[1:-1])]
    if not notes:
        return
    figure.draw_without_rendering()  # the layout determines the distances of markers
    scale = 72 / figure.dpi
    markers = [tuple(scale * axes.transData.transform(point)) for point, _ in notes]
    occupied = [(x - 4, y - 4, x + 4, y + 4) for x, y in markers]
    for (point, text), (x, y) in zip(notes[:MAX_NOTES], markers, strict=False):
        width = 0.65 * NOTE_SIZE * len(text)
        for right, up in NOTE_OFFSETS:
            left = x + right if right > 0 else x + right - width
            box = (left, y + up, left + width, y + up + NOTE_SIZE)
            if not any(_overlap(box, other) for other in occupied):
                axes.annotate(
                    text, point, xytext=(right, up), textcoords="offset points",
                    ha="left" if right > 0 else "right", fontsize=NOTE_SIZE,
                )  # fmt: skip
                occupied.append(box)
                break


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
