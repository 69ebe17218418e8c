"""Draw the plots of a report: as SVG in the text colour of the page, and as PNG.

The colours are those of Okabe and Ito (2008), which colour-blind readers can distinguish; markers, dashes
and hatches repeat the information. matplotlib is an extra and is imported with this module.
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
INK = "#0a0b0c"  # placeholder for the text colour of the page
PNG = {"text.color": "black", "axes.labelcolor": "black", "axes.edgecolor": "black", "xtick.color": "black",
       "ytick.color": "black", "hatch.color": "black", "figure.facecolor": "white"}  # fmt: skip
SVG = {**dict.fromkeys(PNG, INK), "figure.facecolor": "none", "svg.fonttype": "none"}
COMMON = {
    "font.family": "DejaVu Sans", "font.size": 10, "axes.facecolor": "none", "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25, "grid.color": "#808080",
    "text.parse_math": False,  # a name may contain dollar signs
    "legend.frameon": False, "hatch.linewidth": 0.6, "axes.titlesize": 11, "axes.axisbelow": True,
}  # fmt: skip
WIDTH = 9.0  # inches
MAX_CURVES = 18
MAX_NOTES = 300  # each is compared with all before it
NOTE_SIZE = 8.0  # font size of a note, points
# Points from a marker to the near lower corner of its note.
NOTE_OFFSETS = ((6, 4), (-6, 4), (6, -11), (-6, -11))


@dataclass(frozen=True)
class Plot:
    """A plot in both formats."""

    name: str  # of its PNG file
    section: str
    title: str
    caption: str  # how to read it
    svg: str  # an element for the page
    png: bytes


@dataclass(frozen=True)
class Note:
    """A text beside the marker at (x, y), in data units."""

    x: float
    y: float
    text: str


def plot(name: str, section: str, title: str, caption: str, figure: Callable[[], Figure]) -> Plot:
    """Draw `figure` in both formats."""
    with mpl.rc_context({**COMMON, **PNG}):
        png = io.BytesIO()
        figure().savefig(png, format="png", dpi=144, bbox_inches="tight")
    with mpl.rc_context({**COMMON, **SVG, "svg.hashsalt": name}):
        svg = io.StringIO()
        figure().savefig(svg, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    return Plot(name, section, title, caption, _inline(svg.getvalue(), title), png.getvalue())


def _inline(svg: str, title: str) -> str:
    """The SVG element in the text colour of the page, without group ids, which are the same in all plots."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'<g id="[^"]*">', "<g>", body).replace(INK, "currentColor")
    return body.replace("<svg ", f'<svg role="img" aria-label="{html.escape(title)}" ', 1)


def canvas(height: float, *, columns: int = 1) -> tuple[Figure, Any]:
    """A figure of this height in inches with `columns` axes."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots(1, columns)


def ink() -> str:
    """The current text colour."""
    return str(mpl.rcParams["text.color"])


def style(index: int) -> dict[str, Any]:
    """Colour, marker and dashes of the curve number `index`."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": DASHES[index // len(COLOURS) % len(DASHES)],
    }


def bar_chart(rows: Sequence[Row]) -> tuple[Figure, Axes]:
    """An empty chart with one horizontal bar per run."""
    figure, axes = canvas(1.1 + 0.36 * len(rows))
    axes.set_yticks(range(len(rows)), labels=[short(row.label) for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    return figure, axes


def short(label: str) -> str:
    """The label, truncated to 48 characters."""
    return label if len(label) <= 48 else label[:47] + "…"


def first_of(shown: int, count: int) -> str:
    """A sentence for the caption if only `shown` of `count` curves are drawn."""
    return f" The first {shown} of {count}." if count > shown else ""


def spread(axis: Axis, values: Sequence[float], *, name: str) -> None:
    """Label the axis; make it logarithmic if the largest value is over five times the smallest.

    A linear axis has margins of 5 % of the largest value, so that nearly equal values look close.
    """
    if max(values) > 5 * min(values):
        set_scale = axis.axes.set_xscale if isinstance(axis, XAxis) else axis.axes.set_yscale
        set_scale("log")
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    else:
        margin = 0.05 * max(values)
        axis.set_view_interval(min(values) - margin, max(values) + margin, ignore=True)
    axis.set_label_text(name)


def annotate(figure: Figure, axes: Axes, notes: Sequence[Note]) -> None:
    """Write each note where it covers no marker and no other note, or omit it if there is no room.

    Earlier notes are placed first. Their widths are estimated because a backend measures them only at the
    end.
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
