"""The losses of training and validation over the samples consumed, with a panel for each kind of work.

A user's own script may report only its steps. The x-axis of a panel with such a run shows steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpc_parallel.report import picture
from hpc_parallel.report.figures import number
from hpc_parallel.report.gather import Row

MAX_POINTS = 300
TRAINING, VALIDATION = "loss", "validation_loss"
AXES = {"samples": "samples consumed", "step": "step"}  # keys of a line of metrics
THINNEST, WIDER = 1.3, 0.7  # of a line, points; each earlier curve is wider than the next one
DOTTED = {"linestyle": ":", "fillstyle": "none", "linewidth": THINNEST}
VALIDATED = picture.Curve((), {**DOTTED, "color": picture.INK, "marker": "o"}, "validation")


def pictures(rows: Sequence[Row]) -> Iterator[picture.Picture]:
    """One plot of the losses of all runs that logged at least two."""
    drawn = [row for row in rows if len(points(row, TRAINING, over=axis_of([row]))) > 1]
    if not drawn:
        return
    of_kinds = picture.kinds(drawn, most=picture.MAX_CURVES)
    graphs = [_graph(kind) for kind in of_kinds]
    count = sum(len(kind.rows) for kind in of_kinds)
    validated = sum(len(graph.curves) for graph in graphs) > count
    panels = [(kind.title, [graph]) for kind, graph in zip(of_kinds, graphs, strict=True)]
    yield picture.Picture(
        "loss", "loss", f"Loss of {drawn[0].label}" if len(drawn) == 1 else f"Loss by {AXES[axis_of(drawn)]}",
        ("Lines: training. Dotted, hollow markers: validation. " if validated else "Training only. ")
        + "Runs of the same configuration should coincide, whatever their layout: of curves that lie on "
        "each other, the wider ones show at the edges." * (len(drawn) > 1)
        + picture.first_of(count, len(drawn)),
        picture.Graphs(panels, 3.6, [VALIDATED] * validated, own_legends=len(panels) > 1),  # colours repeat
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


def _graph(kind: picture.WorkKind) -> picture.Graph:
    over = axis_of(kind.rows)
    curves = []
    for index, (row, text) in enumerate(zip(kind.rows, kind.legend, strict=True)):
        training, validation = (points(row, key, over=over) for key in (TRAINING, VALIDATION))
        spacing = max(1, len(training) // 8)
        width = THINNEST + WIDER * min(len(kind.rows) - 1 - index, 5)
        look = picture.style(index, markersize=5, linewidth=width, markevery=(index % spacing, spacing))
        curves.append(picture.Curve(training, look, text))
        if validation:
            curves.append(picture.Curve(validation, picture.style(index, markersize=7, **DOTTED)))
    return picture.Graph(picture.PlotAxis(AXES[over]), picture.PlotAxis("loss"), curves)
