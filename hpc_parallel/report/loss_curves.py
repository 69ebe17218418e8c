"""The losses of training and validation over the samples consumed, with a panel for each kind of work.

A user's own script may report only its steps. The x-axis of a panel with such a run shows steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from hpc_parallel.report.drawing import (
    MAX_CURVES,
    Plot,
    WorkKind,
    add_legend,
    canvas,
    drawn_of,
    ink,
    kinds,
    name_panel,
    plot,
    style,
    words_of,
)
from hpc_parallel.report.figures import number
from hpc_parallel.report.gather import Row
from hpc_parallel.report.labels import legend

MAX_POINTS = 300
TRAINING, VALIDATION = "loss", "validation_loss"
AXES = {"samples": "samples consumed", "step": "step"}  # keys of a line of metrics
THINNEST, WIDER = 1.3, 0.7  # of a line, points; each earlier curve is wider than the next one


def plots(rows: Sequence[Row]) -> Iterator[Plot]:
    """One plot of the losses of all runs that logged at least two."""
    if drawn := [row for row in rows if len(points(row, TRAINING, over=axis_of([row]))) > 1]:
        of_kinds = kinds(drawn, most=MAX_CURVES)
        validated = any(
            points(row, VALIDATION, over=axis_of([row])) for kind in of_kinds for row in kind.rows
        )
        title = f"Loss of {drawn[0].label}" if len(drawn) == 1 else f"Loss by {AXES[axis_of(drawn)]}"
        yield plot(
            "loss", "loss", title,
            ("Lines: training. Dotted, hollow markers: validation. " if validated else "Training only. ")
            + "Runs of the same configuration should coincide, whatever their layout: of curves that lie on "
            "each other, the wider ones show at the edges." * (len(drawn) > 1)
            + drawn_of((kind.rows for kind in of_kinds), len(drawn)),
            partial(_figure, of_kinds, validated=validated),
        )  # fmt: skip


def axis_of(rows: Sequence[Row]) -> str:
    """The key of AXES over which the curves of one panel are drawn. All runs of the panel must have it."""
    return "samples" if all(points(row, TRAINING, over="samples") for row in rows) else "step"


def points(row: Row, key: str, *, over: str) -> list[tuple[float, float]]:
    """Samples consumed or step, and loss, reduced to about MAX_POINTS points."""
    lines = [
        (place, loss)
        for line in row.run.metrics
        if (place := number(line.get(over))) is not None and (loss := number(line.get(key))) is not None
    ]
    stride = max(1, len(lines) // MAX_POINTS)
    return lines[::stride] + lines[-1:] * bool(len(lines) % stride != 1 and stride > 1)


def _figure(of_kinds: Sequence[WorkKind], *, validated: bool) -> Figure:
    figure, panels = canvas(*(3.6 for _ in of_kinds))
    handles: list[Line2D] = []
    labels: list[str] = []
    for (axes,), kind in zip(panels, of_kinds, strict=True):
        over = axis_of(kind.rows)
        drawn = [_curve(axes, row, index, len(kind.rows), over=over) for index, row in enumerate(kind.rows)]
        name_panel(axes, kind.title)
        axes.set_xlabel(AXES[over])
        axes.set_ylabel("loss")
        axes.margins(x=0.02)
        if len(of_kinds) > 1:  # colours repeat in the panels, so each panel has its own legend
            names = legend(words_of(kind.rows))
            axes.legend(drawn, names, fontsize=8, loc="upper right")
        else:
            handles, labels = drawn, legend(words_of(kind.rows))
    if validated:
        handles.append(
            Line2D([], [], color=ink(), marker="o", fillstyle="none", linestyle=":", linewidth=THINNEST)
        )
        labels.append("validation")
    if handles:
        add_legend(figure, handles, labels)
    return figure


def _curve(axes: Axes, row: Row, index: int, count: int, *, over: str) -> Line2D:
    """Draw both losses of a run; returns the line of the training."""
    look = style(index)
    places, losses = zip(*points(row, TRAINING, over=over), strict=True)
    spacing = max(1, len(places) // 8)
    width = THINNEST + WIDER * min(count - 1 - index, 5)
    (line,) = axes.plot(
        places, losses, markevery=(index % spacing, spacing), markersize=5, linewidth=width, **look
    )
    if validation := points(row, VALIDATION, over=over):
        places, losses = zip(*validation, strict=True)
        look = {**look, "linestyle": ":", "fillstyle": "none"}
        axes.plot(places, losses, markersize=7, linewidth=THINNEST, **look)
    assert isinstance(line, Line2D)
    return line
