"""All plots of a report. This file has those of scaling, losses, pipelines' steps, times and memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle

from hpc_parallel.record.task_files import RankTimeline, StageWork
from hpc_parallel.record.time_use import time_of
from hpc_parallel.report import bubble, collective_curves, latency, machines, picture
from hpc_parallel.report.figures import number, rank_states
from hpc_parallel.report.gather import Row, timeline
from hpc_parallel.report.labels import legend, short, titles_of_work
from hpc_parallel.report.tables import STRONG, WEAK, Series, Unit, digits, unit_of
from hpc_parallel.report.verdict import Prediction

PEAK = "peak_memory_bytes"
TIMES = {
    "compute": (picture.BLUE, "", "compute"),
    "communication": (picture.VERMILION, "//", "communication"),
    "bubble": (picture.ORANGE, "..", "bubble"),
    "data": (picture.GREEN, "xx", "data"),
    "other": (picture.PURPLE, "\\\\", "other"),
}
USES = {
    "queue": (picture.SKY, "", "queue"),
    "start": (picture.PURPLE, "\\\\", "start"),
    "steps": (picture.BLUE, "", "steps that count"),
    "repeated": (picture.VERMILION, "//", "steps computed again"),
    "idle": (picture.ORANGE, "..", "idle"),
    "restart": (picture.ORANGE, "xx", "waiting for a restart"),
    "away": ("#999999", "--", "until somebody resumed it"),
}
MAX_INTERVALS = 2000
STATES = (
    (picture.BLUE, "", "weights"),
    (picture.ORANGE, "//", "gradients"),
    (picture.GREEN, "..", "optimizer state"),
)
IDEAL = {"linestyle": (0, (1, 1.5)), "linewidth": 1}
DevicePoint = tuple[int, float, float]  # number of devices, rate in any unit, efficiency
MAX_POINTS = 300
TRAINING, VALIDATION = "loss", "validation_loss"
OVER = {"samples": "samples consumed", "step": "step"}  # keys of a line of metrics
THINNEST, WIDER = 1.3, 0.7  # of a line, points; each earlier curve is wider than the next one
DOTTED = {"linestyle": ":", "fillstyle": "none", "linewidth": THINNEST}
VALIDATED = picture.Curve((), {**DOTTED, "color": picture.INK, "marker": "o"}, "validation")
MAX_TIMELINES = 12
KINDS = {  # of a stage's work
    "forward": (picture.BLUE, "", "forward"),
    "loss": (picture.PURPLE, "xx", "loss"),
    "backward": (picture.ORANGE, "//", "backward"),
    "weights": (picture.GREEN, "..", "gradients of weights"),
    "average": (picture.SKY, "\\\\", "average of gradients"),
    "update": (picture.VERMILION, "++", "update"),
}
OTHER = ("#999999", "--", "other work")  # a kind that this version does not know


def pictures(
    rows: Sequence[Row], *, series: Sequence[Series], predictions: Sequence[Prediction]
) -> list[picture.Picture]:
    return [
        *_scaling(series),
        *latency.pictures(rows),
        *_time_use(rows),
        *_step_parts(rows),
        *_peaks(rows),
        *_states(rows),
        *bubble.pictures(rows),
        *losses(rows),
        *_timelines(rows),
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


def _time_use(rows: Sequence[Row]) -> Iterator[picture.Picture]:
    bars = [(row, _causes(row)) for row in rows]
    yield from _of_runs(
        "time_use", "time_use", "Where the time of a run went",
        "From the submission to the end, in order. Each further start follows a failure, a preemption or a "
        "time limit. Validation and saves are parts of the steps around them.",
        bars=[(row, parts) for row, parts in bars if parts], axis=("time since the submission", "seconds"),
        fills=list(USES.values()),
    )  # fmt: skip


def trained_s(row: Row) -> Mapping[str, float]:
    """Seconds by cause of a training that has ended (`time_use.CAUSES`); empty if they are not known."""
    return row.run.totals.time_use_s if row.run.task == "train" else {}


def _causes(row: Row) -> list[tuple[float, picture.Fill]]:
    ended = time_of(row.run.totals.ended)
    if ended is None or not trained_s(row):
        return []
    intervals = row.run.intervals(until=ended)
    return [(part.seconds, USES[part.cause]) for part in intervals[:MAX_INTERVALS]]


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


def _scaling(series: Sequence[Series]) -> Iterator[picture.Picture]:
    for kind in (STRONG, WEAK):
        if of_kind := [one_series for one_series in series if one_series.kind == kind]:
            groups = picture.panels_of(
                of_kind[: picture.MAX_CURVES], lambda series: series.points[0].runs[0].workload
            )
            constant = "global batch" if kind == STRONG else "batch of each device"
            yield picture.Picture(
                f"{kind}_scaling", "scaling", f"{kind.capitalize()} scaling: the same {constant}",
                f"More devices with the same {constant}. Dotted: throughput in proportion to devices. A line "
                "joins runs that differ only in their devices."
                + picture.first_of(sum(map(len, groups)), len(of_kind)),
                _scaling_graphs(groups),
            )  # fmt: skip


def _scaling_graphs(groups: Sequence[Sequence[Series]]) -> picture.Graphs:
    """A panel for each group of series with the same workload."""
    titles = titles_of_work([group[0].points[0].runs[0].run for group in groups], with_batch=False)
    numbered = enumerate(legend(one_series.words for group in groups for one_series in group))
    panels = []
    for group, title in zip(groups, titles, strict=True):
        curves = [
            (*next(numbered), [(at.devices, at.samples_per_s, at.efficiency) for at in one_series.points])
            for one_series in group
        ]
        panels.append((title, scaling_panel(curves, rate="throughput, samples/s")))
    return scaling_graphs(panels)


def scaling_graphs(panels: Sequence[tuple[str, Sequence[picture.Graph]]]) -> picture.Graphs:
    """These panels of scaling, with the ideal in the legend."""
    return picture.Graphs(panels, 3.4, [picture.Curve((), {**IDEAL, "color": picture.INK}, "ideal")])


def scaling_panel(
    curves: Sequence[tuple[int, str, Sequence[DevicePoint]]], *, rate: str
) -> list[picture.Graph]:
    """Rates and efficiencies over devices. curves: number in the figure, text of the legend and points."""
    rates, efficiencies = [], []
    for index, text, points in curves:
        first, first_rate, _ = points[0]
        look = picture.style(index)
        ideal = [(devices, first_rate * devices / first) for devices, _, _ in points]
        rates.append(picture.Curve([(devices, speed) for devices, speed, _ in points], look, text))
        rates.append(picture.Curve(ideal, {**IDEAL, "color": look["color"]}))
        efficiencies.append(picture.Curve([(devices, 100 * share) for devices, _, share in points], look))
    fewest = min(points[0][0] for _, _, points in curves)
    across = picture.PlotAxis("devices", picture.COUNTS)
    up = picture.PlotAxis(f"efficiency, % of {fewest} device{'s' * (fewest > 1)}", picture.FROM_ZERO)
    return [
        picture.Graph(across, picture.PlotAxis(rate, picture.LOGARITHMIC), rates),
        picture.Graph(across, up, efficiencies, level=100),
    ]


def losses(rows: Sequence[Row]) -> Iterator[picture.Picture]:
    """One plot of the losses of training and validation of all runs that logged at least two.

    A user's own script may report only its steps. The x-axis of a panel with such a run shows steps.
    """
    drawn = [row for row in rows if len(_points(row, TRAINING, over=_axis_of([row]))) > 1]
    if not drawn:
        return
    of_kinds = picture.kinds(drawn, most=picture.MAX_CURVES)
    graphs = [_loss_graph(kind) for kind in of_kinds]
    count = sum(len(kind.rows) for kind in of_kinds)
    validated = sum(len(graph.curves) for graph in graphs) > count
    panels = [(kind.title, [graph]) for kind, graph in zip(of_kinds, graphs, strict=True)]
    title = f"Loss of {drawn[0].label}" if len(drawn) == 1 else f"Loss by {OVER[_axis_of(drawn)]}"
    yield picture.Picture(
        "loss", "loss", title,
        ("Lines: training. Dotted, hollow markers: validation. " if validated else "Training only. ")
        + "Runs of the same configuration should coincide, whatever their layout: of curves that lie on "
        "each other, the wider ones show at the edges." * (len(drawn) > 1)
        + picture.first_of(count, len(drawn)),
        picture.Graphs(panels, 3.6, [VALIDATED] * validated, own_legends=len(panels) > 1),  # colours repeat
    )  # fmt: skip


def _axis_of(rows: Sequence[Row]) -> str:
    """The key of OVER over which the curves of one panel are drawn. All runs of the panel must have it."""
    return "samples" if all(_points(row, TRAINING, over="samples") for row in rows) else "step"


def _points(row: Row, key: str, *, over: str) -> list[tuple[float, float]]:
    """Samples consumed or step, and loss, reduced to about MAX_POINTS points."""
    lines = [
        (place, loss)
        for line in row.run.metrics
        if (place := number(line.get(over))) is not None and (loss := number(line.get(key))) is not None
    ]
    stride = max(1, len(lines) // MAX_POINTS)
    return lines[::stride] + lines[-1:] * bool(len(lines) % stride != 1 and stride > 1)


def _loss_graph(kind: picture.WorkKind) -> picture.Graph:
    over = _axis_of(kind.rows)
    curves = []
    for index, (row, text) in enumerate(zip(kind.rows, kind.legend, strict=True)):
        training, validation = (_points(row, key, over=over) for key in (TRAINING, VALIDATION))
        spacing = max(1, len(training) // 8)
        width = THINNEST + WIDER * min(len(kind.rows) - 1 - index, 5)
        look = picture.style(index, markersize=5, linewidth=width, markevery=(index % spacing, spacing))
        curves.append(picture.Curve(training, look, text))
        if validation:
            curves.append(picture.Curve(validation, picture.style(index, markersize=7, **DOTTED)))
    return picture.Graph(picture.PlotAxis(OVER[over]), picture.PlotAxis("loss"), curves)


def _timelines(rows: Sequence[Row]) -> Iterator[picture.Picture]:
    timelines = [(row, ranks) for row in rows if (ranks := timeline(row))]
    for index, (row, ranks) in enumerate(timelines[:MAX_TIMELINES], start=1):
        yield picture.Picture(
            f"timeline_{index}", "timeline", f"One step of {row.label}",
            "What the stages of each device did in one profiled step. Numbers are microbatches "
            "(stage:microbatch if a device has several stages), where there is room. Blank is idle."
            + picture.first_of(MAX_TIMELINES, len(timelines)),
            bars_of(ranks),
        )  # fmt: skip


def bars_of(ranks: Sequence[RankTimeline]) -> picture.Bars:
    length_s = max(rank.length_s for rank in ranks)
    unit = unit_of("seconds", [length_s])
    stages = [sorted({chunk.stage for chunk in rank.chunks}) for rank in ranks]
    with_stage = any(len(rank_stages) > 1 for rank_stages in stages)
    bars = [
        picture.Bar(
            short(f"rank {rank.rank}, stage {' '.join(map(str, rank_stages))}"),
            [_block(chunk, unit, with_stage=with_stage) for chunk in rank.chunks],
        )
        for rank, rank_stages in zip(ranks, stages, strict=True)
    ]
    scale = picture.PlotAxis(
        f"time since the step's start, {unit.name}", picture.FROM_ZERO, [length_s / unit.size]
    )
    return picture.Bars([("", bars)], scale, [*KINDS.values(), OTHER])


def _block(chunk: StageWork, unit: Unit, *, with_stage: bool) -> picture.Block:
    microbatch = "" if chunk.microbatch is None else str(chunk.microbatch)
    text = f"{chunk.stage}:{microbatch}" if microbatch and with_stage else microbatch
    fill = KINDS.get(chunk.kind, OTHER)
    return picture.Block(chunk.start_s / unit.size, chunk.end_s / unit.size, fill, text)
