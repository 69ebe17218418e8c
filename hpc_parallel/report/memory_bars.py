"""Memory per device: the most that GPUs allocated, and the state that was counted on any device.

The peak of a process on a CPU contains the interpreter and its libraries, and is not drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hpc_parallel.report.drawing import (
    BLUE,
    COLOURS,
    GREEN,
    HATCHES,
    MAX_BARS,
    ORANGE,
    Plot,
    WorkKind,
    add_patch_legend,
    bar_chart,
    bar_style,
    drawn_of,
    kinds,
    plot,
)
from hpc_parallel.report.gather import Row
from hpc_parallel.report.rank_state import RankState, rank_states
from hpc_parallel.report.tables import Unit, unit_of

PEAK = "peak_memory_bytes"
PART_STYLES = {  # part of the state -> colour, hatch, name
    "parameters": (BLUE, "", "weights"),
    "gradients": (ORANGE, "//", "gradients"),
    "optimizer": (GREEN, "..", "optimizer state"),
}


def plots(rows: Sequence[Row]) -> Iterator[Plot]:
    """The peak of runs on GPUs, and the state of the fullest device of all runs that counted it."""
    if measured := [row for row in rows if row.figures[PEAK] is not None and not row.on_cpu]:
        of_kinds = kinds(measured, most=MAX_BARS)
        yield plot(
            "memory", "memory", "Peak memory of the fullest device",
            "The maximum that any rank allocated on its device."
            + drawn_of((kind.rows for kind in of_kinds), len(measured)),
            partial(_peaks, of_kinds),
        )  # fmt: skip
    if counted := [row for row in rows if _fullest(row)]:
        of_kinds = kinds(counted, most=MAX_BARS)
        yield plot(
            "state", "memory", "Weights, gradients and optimizer state of the fullest device",
            "Counted on each rank; activations come on top."
            + drawn_of((kind.rows for kind in of_kinds), len(counted)),
            partial(_states, of_kinds),
        )  # fmt: skip


def _fullest(row: Row) -> RankState | None:
    """The state of the rank that holds most; None if it is unknown or empty."""
    state = max(rank_states(row.run.totals), key=lambda state: state.total, default=None)
    return state if state and state.total else None


def _peaks(of_kinds: Sequence[WorkKind]) -> Figure:
    figure, panels = bar_chart(of_kinds)
    values = {id(row): row.figures[PEAK] or 0.0 for kind in of_kinds for row in kind.rows}
    unit = unit_of("bytes", values.values())
    strategies = list(dict.fromkeys(row.strategy for kind in of_kinds for row in kind.rows))
    for axes, kind in zip(panels, of_kinds, strict=True):
        for y, row in enumerate(kind.rows):
            index, value = strategies.index(row.strategy), values[id(row)]
            colour, hatch = COLOURS[index % len(COLOURS)], HATCHES[index % len(HATCHES)]
            axes.barh(y, value / unit.size, height=0.7, **bar_style(colour, hatch))
            _note(axes, value, y, unit)
        axes.set_xlabel(f"memory per device, {unit.name}")
    return figure


def _states(of_kinds: Sequence[WorkKind]) -> Figure:
    figure, panels = bar_chart(of_kinds)
    states = {id(row): _fullest(row) or RankState(0, 0, 0) for kind in of_kinds for row in kind.rows}
    unit = unit_of("bytes", (state.total for state in states.values()))
    for axes, kind in zip(panels, of_kinds, strict=True):
        for y, row in enumerate(kind.rows):
            left = 0.0
            for part, (colour, hatch, _) in PART_STYLES.items():
                width = getattr(states[id(row)], part) / unit.size
                axes.barh(y, width, left=left, height=0.7, **bar_style(colour, hatch))
                left += width
            _note(axes, states[id(row)].total, y, unit)
        axes.set_xlabel(f"state per device, {unit.name}")
    styles = PART_STYLES.values()
    add_patch_legend(figure, [style[:2] for style in styles], [name for _, _, name in styles])
    return figure


def _note(axes: Axes, value: float, y: int, unit: Unit) -> None:
    axes.annotate(
        unit.show(value), (value / unit.size, y), xytext=(4, 0), textcoords="offset points", va="center",
        fontsize=9,
    )  # fmt: skip
