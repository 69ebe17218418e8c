"""Plots as data: their titles, axes, curves and bars. `drawing` draws them; this module needs no matplotlib.

The colours are those of Okabe and Ito (2008), which colour-blind readers can distinguish. Markers, dashes and
hatches repeat the information.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hpc_parallel.report.gather import Row
from hpc_parallel.report.labels import labels_of, legend, titles_of_work

T = TypeVar("T")
BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
COLOURS = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY)
INK = "ink"  # stands for the text colour of the page
MARKERS, DASHES = "osD^vPX*", ("-", "--", ":", "-.")
HATCHES = ("", "//", "..", "xx", "\\\\", "++", "oo", "--")
MAX_CURVES, MAX_PANELS, MAX_BARS = 18, 6, 40
# Kinds of scales. SPREAD: logarithmic if the largest value is over five times the smallest. SIZES:
# logarithmic with a power of two at each tick. COUNTS: the same with a tick at each point.
LINEAR, FROM_ZERO, LOGARITHMIC, SPREAD = "linear", "from zero", "logarithmic", "spread"
SIZES, COUNTS = "sizes", "counts"

Look = Mapping[str, Any]  # arguments of matplotlib for a line
Fill = tuple[str, str, str]  # colour and hatch of a bar, and what it means


@dataclass(frozen=True)
class PlotAxis:
    """An axis. values: those that it spans, in place of those of the curves; of FROM_ZERO, only the end."""

    name: str
    kind: str = LINEAR
    values: Sequence[float] = ()
    text: Callable[[float], str] = str  # of a tick of SIZES


@dataclass(frozen=True)
class Curve:
    """One line of a graph.

    tops: upper ends of thin vertical lines that begin at its points. notes: texts beside its points, where
    there is room.
    """

    points: Sequence[tuple[float, float]]
    look: Look
    text: str = ""  # in the legend
    tops: Sequence[float] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Graph:
    """Curves over the same axes. level: where a dotted horizontal line is."""

    x: PlotAxis
    y: PlotAxis
    curves: Sequence[Curve]
    level: float | None = None


@dataclass(frozen=True)
class Graphs:
    """Panels below each other, each with a title and graphs side by side. height: of a panel, in inches.

    The legend is below all panels, or inside each panel if `own_legends`. more: curves for this legend only.
    """

    panels: Sequence[tuple[str, Sequence[Graph]]]
    height: float
    more: Sequence[Curve] = ()
    own_legends: bool = False


@dataclass(frozen=True)
class Block:
    """A part of a bar. text: what is written on it if it has room."""

    start: float
    end: float
    fill: Fill
    text: str = ""


@dataclass(frozen=True)
class Bar:
    """A horizontal bar. note: a text behind its end."""

    name: str
    blocks: Sequence[Block]
    note: str = ""


@dataclass(frozen=True)
class Bars:
    """Panels of horizontal bars, as (title, bars). marked: place and dashes of a line across all bars.

    fills: in the order of the legend, which leaves out those without a block.
    """

    panels: Sequence[tuple[str, Sequence[Bar]]]
    scale: PlotAxis
    fills: Sequence[Fill] = ()
    marked: tuple[float, str] | None = None


@dataclass(frozen=True)
class HeatMap:
    """A table of values between each two of these; NaN where there is none."""

    names: Sequence[str]
    table: Sequence[Sequence[float]]
    unit: str


@dataclass(frozen=True)
class Picture:
    """A plot. caption: how to read it."""

    name: str
    section: str
    title: str
    caption: str
    content: Graphs | Bars | HeatMap


@dataclass(frozen=True)
class WorkKind:
    """The runs of one kind of work (script, model, data, task, global batch), which are comparable."""

    title: str  # what differs from the other kinds; empty if it is the only one
    rows: Sequence[Row]

    @property
    def legend(self) -> list[str]:
        return legend(words_of(self.rows))


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


def first_of(drawn: int, count: int) -> str:
    """A sentence for the caption if only `drawn` of `count` curves or bars are drawn."""
    return f" The first {drawn} of {count}." if count > drawn else ""


def words_of(rows: Sequence[Row]) -> list[Sequence[str]]:
    """The parts of each label that differ among these runs."""
    labels = labels_of([row.run for row in rows], [row.layout_text for row in rows])
    return [label.words for label in labels]


def style(index: int, **changes: Any) -> Look:
    """Colour, marker and dashes of the curve number `index`."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": DASHES[index // len(COLOURS) % len(DASHES)],
        **changes,
    }


def stacked(parts: Iterable[tuple[float, Fill]]) -> list[Block]:
    """Blocks of these lengths, one after the other; none for a length of 0."""
    blocks, end = [], 0.0
    for length, fill in (part for part in parts if part[0]):
        blocks.append(Block(end, end + length, fill))
        end += length
    return blocks
