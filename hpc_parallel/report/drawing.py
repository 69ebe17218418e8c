"""How every plot of a report is drawn: once for the page (SVG in the text's own colour) and once as PNG.

Colours are those of Okabe and Ito (2008), which colour-blind readers tell apart; markers, dashes and
hatches say the same again. matplotlib is an extra, and imported with this module.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis, XAxis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from hpc_parallel.report.gather import Row

BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
COLOURS = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY)
MARKERS, DASHES = "osD^vPX*", ("-", "--", ":", "-.")
HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo", "--")
INK = "#0a0b0c"  # stands for the text's colour until the page gives it one
PNG = {"text.color": "black", "axes.labelcolor": "black", "axes.edgecolor": "black", "xtick.color": "black",
       "ytick.color": "black", "hatch.color": "black", "figure.facecolor": "white"}  # fmt: skip
SVG = {**dict.fromkeys(PNG, INK), "figure.facecolor": "none", "svg.fonttype": "none"}
COMMON = {
    "font.family": "DejaVu Sans", "font.size": 10, "axes.facecolor": "none", "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25, "grid.color": "#808080",
    "text.parse_math": False,  # a name may hold dollars
    "legend.frameon": False, "hatch.linewidth": 0.6, "axes.titlesize": 11, "axes.axisbelow": True,
}  # fmt: skip
WIDTH = 9.0  # inches
MOST_CURVES = 18
MOST_NOTES = 300  # each is held against all before it
NOTE_SIZE = 8.0  # points, of a word beside a marker
NOTE_PLACES = ((6, 4), (-6, 4), (6, -11), (-6, -11))  # points from its marker to its lower inner corner


@dataclass(frozen=True)
class Plot:
    """`name`: of its PNG file; `svg`: an element to stand in a page; `caption`: how it is to be read."""

    name: str
    section: str
    title: str
    caption: str
    svg: str
    png: bytes


@dataclass(frozen=True)
class Note:
    """A word to stand beside the marker at (x, y), in the units of the data."""

    x: float
    y: float
    text: str


def plot(name: str, section: str, title: str, caption: str, figure: Callable[[], Figure]) -> Plot:
    with mpl.rc_context({**COMMON, **PNG}):
        png = io.BytesIO()
        figure().savefig(png, format="png", dpi=144, bbox_inches="tight")
    with mpl.rc_context({**COMMON, **SVG, "svg.hashsalt": name}):
        svg = io.StringIO()
        figure().savefig(svg, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    return Plot(name, section, title, caption, _inline(svg.getvalue(), title), png.getvalue())


def _inline(svg: str, title: str) -> str:
    """The element alone, in the page's own ink; groups lose their names, which all plots have alike."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'<g id="[^"]*">', "<g>", body).replace(INK, "currentColor")
    return body.replace("<svg ", f'<svg role="img" aria-label="{html.escape(title)}" ', 1)


def canvas(height: float, *, columns: int = 1) -> tuple[Figure, Any]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots(1, columns)


def ink() -> str:
    return str(mpl.rcParams["text.color"])


def style(place: int) -> dict[str, Any]:
    return {
        "color": COLOURS[place % len(COLOURS)],
        "marker": MARKERS[place % len(MARKERS)],
        "linestyle": DASHES[place // len(COLOURS) % len(DASHES)],
    }


def bar_chart(rows: Sequence[Row]) -> tuple[Figure, Axes]:
    figure, axes = canvas(1.1 + 0.36 * len(rows))
    axes.set_yticks(range(len(rows)), labels=[short(row.label) for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    return figure, axes


def short(label: str) -> str:
    return label if len(label) <= 48 else label[:47] + "…"


def first_of(shown: int, count: int) -> str:
    """What a caption adds where not all curves are drawn."""
    return f" The first {shown} of {count}." if count > shown else ""


def spread(axis: Axis, values: Sequence[float], *, name: str) -> None:
    """Name the axis, and make it logarithmic where the largest value is over five times the smallest; else it
    shows a twentieth more on both sides, or values that are nearly the same would look far apart."""
    if max(values) > 5 * min(values):
        set_scale = axis.axes.set_xscale if isinstance(axis, XAxis) else axis.axes.set_yscale
        set_scale("log")
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    else:
        room = 0.05 * max(values)
        axis.set_view_interval(min(values) - room, max(values) + room, ignore=True)
    axis.set_label_text(name)


def annotate(figure: Figure, axes: Axes, notes: Sequence[Note]) -> None:
    """Write each word where it covers no marker and no other word; where there is no room, not at all.

    The first ones choose first. Widths are estimated, since a backend would measure them only in its end.
    """
    figure.draw_without_rendering()  # the layout decides how far apart two markers are
    scale = 72 / figure.dpi
    markers = [tuple(scale * axes.transData.transform((note.x, note.y))) for note in notes]
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in markers]
    for note, (x, y) in zip(notes[:MOST_NOTES], markers, strict=False):
        width = 0.65 * NOTE_SIZE * len(note.text)
        for right, up in NOTE_PLACES:
            left = x + right if right > 0 else x + right - width
            box = (left, y + up, left + width, y + up + NOTE_SIZE)
            if not any(_overlap(box, other) for other in taken):
                axes.annotate(
                    note.text, (note.x, note.y), xytext=(right, up), textcoords="offset points",
                    ha="left" if right > 0 else "right", fontsize=NOTE_SIZE,
                )  # fmt: skip
                taken.append(box)
                break


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
