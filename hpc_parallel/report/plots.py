"""All plots of a report, and those that are bars: times, memory, and measured figures beside planned ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle

from hpc_parallel.report import (
    bubble,
    collective_curves,
    latency,
    loss_curves,
    machines,
    picture,
    scaling_curves,
    timeline_drawing,
)
from hpc_parallel.report.figures import rank_states
from hpc_parallel.report.gather import Row
from hpc_parallel.report.labels import legend
from hpc_parallel.report.predictions import Prediction
from hpc_parallel.report.tables import Series, digits, unit_of

PEAK = "peak_memory_bytes"
TIMES = {
    "compute": (picture.BLUE, "", "compute"),
    "communication": (picture.VERMILION, "//", "communication"),
    "bubble": (picture.ORANGE, "..", "bubble"),
    "data": (picture.GREEN, "xx", "data"),
    "other": (picture.PURPLE, "\\\\", "other"),
}
STATES = (
    (picture.BLUE, "", "weights"),
    (picture.ORANGE, "//", "gradients"),
    (picture.GREEN, "..", "optimizer state"),
)


def pictures(
    rows: Sequence[Row], *, series: Sequence[Series], predictions: Sequence[Prediction]
) -> list[picture.Picture]:
    """All plots for which these runs have figures."""
    return [
        *scaling_curves.pictures(series),
        *latency.pictures(rows),
        *_step_parts(rows),
        *_peaks(rows),
        *_states(rows),
        *bubble.pictures(rows),
        *loss_curves.pictures(rows),
        *timeline_drawing.pictures(rows),
        *_ratios(predictions),
        *collective_curves.pictures(rows),
        *machines.pictures(rows),
    ]


def _step_parts(rows: Sequence[Row]) -> Iterator[picture.Picture]:
    yield from _of_runs(
        "step_parts", "parts", "Where the time of a step goes",
        "Parts of a profiled step, mean over the ranks. Profiling makes the step longer.",
        bars=[(row, [(row.parts[part], fill) for part, fill in TIMES.items()]) for row in rows if row.parts],
        axis=("time of one step", "seconds"), fills=list(TIMES.values()),
    )  # fmt: skip


def _peaks(rows: Sequence[Row]) -> Iterator[picture.Picture]:
    """The peak of a process on a CPU contains the interpreter and its libraries, and is not drawn."""
    measured = [(row, peak) for row in rows if (peak := row.figures[PEAK]) is not None and not row.on_cpu]
    strategies = list(dict.fromkeys(row.strategy for row, _ in measured))
    looks = zip(cycle(picture.COLOURS), cycle(picture.HATCHES), cycle([""]), strict=False)
    fills = dict(zip(strategies, looks, strict=False))
    yield from _of_runs(
        "memory", "memory", "Peak memory of the fullest device",
        "The maximum that any rank allocated on its device.",
        bars=[(row, [(peak, fills[row.strategy])]) for row, peak in measured],
        axis=("memory per device", "bytes"),
    )  # fmt: skip


def _states(rows: Sequence[Row]) -> Iterator[picture.Picture]:
    counted = [
        (row, max(states, key=lambda state: state.total))
        for row in rows
        if (states := rank_states(row.run.totals))
    ]
    bars = [
        (row, list(zip((state.parameters, state.gradients, state.optimizer), STATES, strict=True)))
        for row, state in counted
        if state.total
    ]
    yield from _of_runs(
        "state", "memory", "Weights, gradients and optimizer state of the fullest device",
        "Counted on each rank; activations come on top.",
        bars=bars, axis=("state per device", "bytes"), fills=STATES,
    )  # fmt: skip


def _of_runs(
    *texts: str,
    bars: Sequence[tuple[Row, Sequence[tuple[float, picture.Fill]]]],
    axis: tuple[str, str],
    fills: Sequence[picture.Fill] = (),
) -> Iterator[picture.Picture]:
    """A bar for each run, in a panel for each kind of work; nothing without bars.

    texts: of the picture. axis: its name and the kind of its unit. The sum is written behind bars of bytes.
    """
    parts = {id(row): of_row for row, of_row in bars}
    totals = {id(row): sum(length for length, _ in of_row) for row, of_row in bars}
    of_kinds = picture.kinds([row for row, _ in bars], most=picture.MAX_BARS)
    drawn = [id(row) for kind in of_kinds for row in kind.rows]
    unit = unit_of(axis[1], (totals[row] for row in drawn))

    def bar(name: str, row: int) -> picture.Bar:
        blocks = picture.stacked((length / unit.size, fill) for length, fill in parts[row])
        return picture.Bar(name, blocks, unit.show(totals[row]) if axis[1] == "bytes" else "")

    if drawn:
        name, section, title, caption = texts
        panels = [(kind.title, list(map(bar, kind.legend, map(id, kind.rows)))) for kind in of_kinds]
        content = picture.Bars(panels, picture.PlotAxis(f"{axis[0]}, {unit.name}", picture.FROM_ZERO), fills)
        caption += picture.first_of(len(drawn), len(bars))
        yield picture.Picture(name, section, title, caption, content)


def _ratios(predictions: Sequence[Prediction]) -> Iterator[picture.Picture]:
    if with_ratio := [prediction for prediction in predictions if prediction.ratio is not None]:
        drawn = with_ratio[: picture.MAX_BARS]
        names = legend((*prediction.row.names.words, prediction.title) for prediction in drawn)
        ratios = [prediction.ratio or 1.0 for prediction in drawn]
        bars = []
        for name, ratio in zip(names, ratios, strict=True):
            fill = (picture.VERMILION, "//", "") if ratio > 1 else (picture.BLUE, "", "")
            block = picture.Block(min(1, ratio), max(1, ratio), fill)
            bars.append(picture.Bar(name, [block], digits(ratio, 3)))
        reach = max(*ratios, 1 / min(ratios), 2)
        room = (1 / reach, 1.2 * reach)  # also for the notes
        scale = picture.PlotAxis("measured / predicted", picture.LOGARITHMIC, room)
        yield picture.Picture(
            "predicted", "predicted", "Measured divided by predicted",
            "1 is an exact prediction. Twice and half are equally far from it."
            + picture.first_of(picture.MAX_BARS, len(with_ratio)),
            picture.Bars([("", bars)], scale, marked=(1, "-")),
        )  # fmt: skip
