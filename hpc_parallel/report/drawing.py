"""Draw the plots of a report: as SVG for wide and narrow screens, and as PNG.

The text in an SVG has the text colour of the page. The other colours are those of Okabe and Ito (2008), which
colour-blind readers can distinguish. Markers, dashes and hatches repeat the information. matplotlib is an
extra and is imported with this module.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any, TypeVar

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis, XAxis
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from hpc_parallel.report.gather import Row
from hpc_parallel.report.labels import ROOM, labels_of, legend, titles_of_work

T = TypeVar("T")
BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
COLOURS = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY)
MARKERS, DASHES = "osD^vPX*", ("-", "--", ":", "-.")
HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo", "--")
WIDTH, NARROW = 9.0, 4.3  # width in inches of a plot, and of the same plot on a phone
INK = "#0a0b0c"  # placeholder for the text colour of the page
PNG = {"text.color": "black", "axes.labelcolor": "black", "axes.edgecolor": "black", "xtick.color": "black",
       "ytick.color": "black", "hatch.color": "black", "figure.facecolor": "white"}  # fmt: skip
SVG = {**dict.fromkeys(PNG, INK), "figure.facecolor": "none", "svg.fonttype": "none"}
COMMON = {
    "font.family": "DejaVu Sans", "font.size": 10, "axes.facecolor": "none", "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25, "grid.color": "#808080",
    "text.parse_math": False,  # a name may contain dollar signs
    "figure.figsize": (WIDTH, WIDTH), "legend.frameon": False, "hatch.linewidth": 0.6,
    "axes.titlesize": 11, "axes.axisbelow": True,
}  # fmt: skip
TITLE_SIZE, CHARACTERS_PER_INCH = 11.5, 10
STEPS = (1, 2, 5, 10)  # between the ticks of an axis
MAX_CURVES, MAX_PANELS, MAX_BARS = 18, 6, 40
MAX_NOTES = 300  # each note is compared with all notes before it
NOTE_SIZE = 8.0  # font size of a note, points
# Offsets in points from a marker to the nearer lower corner of its note.
NOTE_OFFSETS = ((6, 4), (-6, 4), (6, -11), (-6, -11))


@dataclass(frozen=True)
class Plot:
    """A plot in all formats."""

    name: str  # of its PNG file
    section: str
    title: str
    caption: str  # how to read it
    svg: str  # an element for the page
    narrow_svg: str  # the same for a narrow page
    png: bytes


@dataclass(frozen=True)
class Note:
    """A text beside the marker at (x, y), in data units."""

    x: float
    y: float
    text: str


@dataclass(frozen=True)
class WorkKind:
    """The runs of one kind of work (model, data, task, global batch), which are comparable."""

    title: str  # what differs from the other kinds; empty if it is the only one
    rows: Sequence[Row]


def kinds(rows: Sequence[Row], *, most: int) -> list[WorkKind]:
    """The first `most` runs of each of the first MAX_PANELS kinds of work."""
    groups = panels_of(rows, lambda row: row.work)
    titles = titles_of_work([group[0].run for group in groups])
    return [WorkKind(title, group[:most]) for title, group in zip(titles, groups, strict=True)]


def panels_of(items: Sequence[T], key: Callable[[T], object]) -> list[list[T]]:
    """The items of the first MAX_PANELS values of `key`, in the order of the items."""
    groups: dict[object, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())[:MAX_PANELS]


def drawn_of(groups: Iterable[Sequence[object]], count: int) -> str:
    """A sentence for the caption if these groups together have fewer than `count` curves or bars."""
    return first_of(sum(map(len, groups)), count)


def words_of(rows: Sequence[Row]) -> list[Sequence[str]]:
    """The parts of each label that differ among these runs."""
    labels = labels_of([row.run for row in rows], [row.layout_text for row in rows])
    return [label.words for label in labels]


def plot(name: str, section: str, title: str, caption: str, figure: Callable[[], Figure]) -> Plot:
    """Draw `figure` in all formats, each with the title above it."""
    with mpl.rc_context({**COMMON, **PNG}):
        png = io.BytesIO()
        _titled(figure(), title).savefig(png, format="png", dpi=144, bbox_inches="tight")
    wide, narrow = (_svg(figure, title, name=name, width=width) for width in (WIDTH, NARROW))
    return Plot(name, section, title, caption, wide, narrow, png.getvalue())


def _svg(figure: Callable[[], Figure], title: str, *, name: str, width: float) -> str:
    size = {"figure.figsize": (width, width)}
    with mpl.rc_context({**COMMON, **SVG, **size, "svg.hashsalt": f"{name} {width}"}):
        svg = io.StringIO()
        drawn = _titled(figure(), title)
        drawn.savefig(svg, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    return _inline(svg.getvalue(), title)


def _titled(figure: Figure, title: str) -> Figure:
    """Write the title above the figure, in as many lines as it needs."""
    text = fill(title, int(CHARACTERS_PER_INCH * figure.get_figwidth()))
    figure.set_figheight(figure.get_figheight() + 0.2 * text.count("\n"))
    figure.suptitle(text, x=0.01, ha="left", fontsize=TITLE_SIZE)
    return figure


def _inline(svg: str, title: str) -> str:
    """The SVG element in the text colour of the page. Group ids are removed: all plots have the same ids."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'<g id="[^"]*">', "<g>", body).replace(INK, "currentColor")
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


def bar_style(colour: str, hatch: str) -> dict[str, Any]:
    """The look of a bar, and of its patch in a legend."""
    return {"facecolor": colour, "hatch": hatch, "edgecolor": ink(), "linewidth": 0.4}


def add_patch_legend(figure: Figure, styles: Iterable[tuple[str, str]], names: Sequence[str]) -> None:
    """A legend with a patch for each (colour, hatch) of bars."""
    add_legend(figure, [Patch(**bar_style(*each)) for each in styles], names)


def style(index: int) -> dict[str, Any]:
    """Colour, marker and dashes of the curve number `index`."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": DASHES[index // len(COLOURS) % len(DASHES)],
    }


def bar_chart(of_kinds: Sequence[WorkKind]) -> tuple[Figure, list[Axes]]:
    """An empty chart with a panel for each kind of work and one horizontal bar per run in it."""
    figure, panels = canvas(*(1.0 + 0.36 * len(kind.rows) for kind in of_kinds))
    for (axes,), kind in zip(panels, of_kinds, strict=True):
        name_bars(axes, legend(words_of(kind.rows)))
        name_panel(axes, kind.title)
    return figure, [axes for (axes,) in panels]


def name_panel(axes: Axes, title: str) -> None:
    """Write the title of a kind of work above its panel."""
    text = title if len(title) <= 2 * ROOM else f"{title[: 2 * ROOM - 1]}…"
    axes.set_title(text if is_wide() else fill(text, ROOM), loc="left", fontsize=10 if is_wide() else 8)


def name_bars(axes: Axes, labels: Sequence[str]) -> None:
    """Name the bars at 0, 1, ... from top to bottom."""
    axes.set_yticks(range(len(labels)), labels=[label if is_wide() else fill(label, 20) for label in labels])
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0, labelsize=10 if is_wide() else 8)


def short(label: str) -> str:
    """The label, truncated to ROOM characters."""
    return label if len(label) <= ROOM else f"{label[: ROOM - 1]}…"


def first_of(drawn: int, count: int) -> str:
    """A sentence for the caption if only `drawn` of `count` curves or bars are drawn."""
    return f" The first {drawn} of {count}." if count > drawn else ""


def spread(axis: Axis, values: Sequence[float], *, name: str) -> None:
    """Label the axis, and make it logarithmic if the largest value is over five times the smallest.

    values: positive. A linear axis has margins of 5 % of the largest value, so that nearly equal values look
    close.
    """
    if max(values) > 5 * min(values):
        logarithmic(axis, values, name=name)
        return
    margin = 0.05 * max(values)
    set_limits = axis.axes.set_xlim if isinstance(axis, XAxis) else axis.axes.set_ylim
    set_limits(min(values) - margin, max(values) + margin)
    axis.set_label_text(name)


def logarithmic(axis: Axis, values: Sequence[float], *, name: str) -> None:
    """Label the axis and make it logarithmic, with ticks of 1, 2 and 5 times a power of ten.

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
    axis.set_label_text(name)


def annotate(figure: Figure, axes: Axes, notes: Sequence[Note]) -> None:
    """Write each note where it covers no marker and no other note, or omit it if there is no room.

    Earlier notes are placed first. The widths of notes are estimated, because a backend measures them only
    at the end.
    """
    figure.draw_without_rendering()  # the layout determines the distances of markers
    scale = 72 / figure.dpi
    markers = [tuple(scale * axes.transData.transform((note.x, note.y))) for note in notes]
    occupied = [(x - 4, y - 4, x + 4, y + 4) for x, y in markers]
    for note, (x, y) in zip(notes[:MAX_NOTES], markers, strict=False):
        width = 0.65 * NOTE_SIZE * len(note.text)
        for right, up in NOTE_OFFSETS:
            left = x + right if right > 0 else x + right - width
            box = (left, y + up, left + width, y + up + NOTE_SIZE)
            if not any(_overlap(box, other) for other in occupied):
                axes.annotate(
                    note.text, (note.x, note.y), xytext=(right, up), textcoords="offset points",
                    ha="left" if right > 0 else "right", fontsize=NOTE_SIZE,
                )  # fmt: skip
                occupied.append(box)
                break


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
