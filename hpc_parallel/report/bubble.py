"""Bubble against memory: how microbatches and schedules trade a pipeline's idle time for memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from hpc_parallel.layout.batch_plan import plan_batch
from hpc_parallel.layout.layout import Layout
from hpc_parallel.layout.schedules import SCHEDULES
from hpc_parallel.report.drawing import Note, add_legend, annotate, canvas, ink, spread, style
from hpc_parallel.report.figures import number
from hpc_parallel.report.gather import Row, identity
from hpc_parallel.report.labels import RUN_KEYS, SPEEDLESS, legend
from hpc_parallel.report.tables import unit_of

CLOSED_FORM = ("gpipe", "1f1b", "naive")
MICROBATCHES = ("microbatches", "microbatch_size")


@dataclass(frozen=True)
class PipelineRun:
    """A run of a pipeline."""

    row: Row
    microbatches: int
    bubble_share: float
    peak_memory_bytes: float | None  # None on a CPU, where the peak would include the interpreter
    formula: float | None  # bubble share from the closed form of its schedule, if there is one


@dataclass(frozen=True)
class ScheduleFamily:
    """Runs that differ only in their number of microbatches, sorted by it."""

    words: Sequence[str]  # the parts of its label
    points: Sequence[PipelineRun]


def families(rows: Sequence[Row]) -> list[ScheduleFamily]:
    """The families of completed pipelines with a bubble; empty if there is only one such run.

    On a GPU, each run also has a peak of memory.
    """
    groups: dict[str, list[PipelineRun]] = defaultdict(list)
    for row in rows:
        if (point := _pipeline_run(row)) is not None:
            groups[_identity_without_microbatches(row)].append(point)
    if sum(map(len, groups.values())) < 2:
        return []
    return [
        ScheduleFamily(_label(points[0].row), sorted(points, key=lambda point: point.microbatches))
        for points in groups.values()
    ]


def closed_form(schedule: str, *, stages: int, microbatches: int) -> float | None:
    """The bubble share (P-1)/(M+P-1) of GPipe and 1F1B (Huang et al. 2019); None for other schedules.

    The formula assumes equal stages and links without cost. If microbatches run one after another, M is 1.
    """
    if schedule not in CLOSED_FORM:
        return None
    in_flight = 1 if SCHEDULES[schedule].in_turn else microbatches
    return (stages - 1) / (in_flight + stages - 1)


def _pipeline_run(row: Row) -> PipelineRun | None:
    share = row.figures["bubble_share"]
    memory = None if row.on_cpu else row.figures["peak_memory_bytes"]
    stages = row.layout.get("pipeline", 1)
    count = _microbatches(row)
    if not row.completed or stages < 2 or share is None or count is None or not (memory or row.on_cpu):
        return None
    formula = closed_form(_schedule(row), stages=stages, microbatches=count)
    return PipelineRun(row, count, share, memory, formula)


def _schedule(row: Row) -> str:
    return str(row.section("strategy").get("schedule"))


def _microbatches(row: Row) -> int | None:
    """The number of microbatches into which the worker split the global batch; None for an invalid file."""
    training, strategy = row.section("training"), row.section("strategy")
    schedule = SCHEDULES.get(_schedule(row))
    try:
        plan = plan_batch(
            row.global_batch_size or 0, layout=Layout(**row.layout),
            microbatch_size=training["microbatch_size"], microbatches=strategy["microbatches"],
            in_turn=schedule is not None and schedule.in_turn,
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, ArithmeticError):
        return None
    return plan.microbatches if number(plan.microbatches) and plan.microbatches > 0 else None


def _identity_without_microbatches(row: Row) -> str:
    config = {key: value for key, value in row.config.items() if key not in (*RUN_KEYS, "seed")}
    for name, excluded in (("training", (*SPEEDLESS, *MICROBATCHES)), ("strategy", MICROBATCHES)):
        config[name] = {key: value for key, value in row.section(name).items() if key not in excluded}
    return f"{row.shape} {row.machine} {identity(config)}"


def _label(row: Row) -> Sequence[str]:
    """`1f1b`, `pipeline 4 x 1`, and other options in which the run differs."""
    excluded = tuple(f"{key}=" for key in (*MICROBATCHES, "schedule"))
    options = [option for option in row.differs if not option.startswith(excluded)]
    return _schedule(row), f"{row.strategy} {row.shape}", *options


def have_memory(families: Sequence[ScheduleFamily]) -> bool:
    """Whether all runs have a peak of memory, which is then the horizontal axis."""
    return all(point.peak_memory_bytes for family in families for point in family.points)


def figure(families: Sequence[ScheduleFamily]) -> Figure:
    """Plot the bubble of every run over memory, or over microbatches; hollow markers show the formula."""
    drawing, ((axes,),) = canvas(3.8)
    points = [point for family in families for point in family.points]
    by_memory = have_memory(families)
    unit = unit_of("bytes", (point.peak_memory_bytes for point in points))

    def x_of(point: PipelineRun) -> float:
        memory_bytes = point.peak_memory_bytes if by_memory else None
        return point.microbatches if memory_bytes is None else memory_bytes / unit.size

    name = f"memory per device, {unit.name}" if by_memory else "microbatches"
    spread(axes.xaxis, [x_of(point) for point in points], name=name)
    handles = [_draw(axes, family, index, x_of) for index, family in enumerate(families)]
    labels = legend(family.words for family in families)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("bubble, %")
    if any(point.formula is not None for point in points):
        handles.append(Line2D([], [], color=ink(), marker="o", linestyle="none", fillstyle="none"))
        labels.append("formula: (P-1)/(M+P-1)")
    add_legend(drawing, handles, labels)
    annotate(drawing, axes, [Note(x_of(p), 100 * p.bubble_share, str(p.microbatches)) for p in points])
    return drawing


def _draw(axes: Axes, family: ScheduleFamily, index: int, x_of: Callable[[PipelineRun], float]) -> Line2D:
    """Draw a family and its formula; returns the line."""
    curve_style = style(index)
    x = [x_of(point) for point in family.points]
    (line,) = axes.plot(x, [100 * point.bubble_share for point in family.points], **curve_style)
    with_formula = [point for point in family.points if point.formula is not None]
    axes.plot(
        [x_of(point) for point in with_formula], [100 * (point.formula or 0) for point in with_formula],
        color=curve_style["color"], marker=curve_style["marker"], linestyle="none", fillstyle="none",
    )  # fmt: skip
    return line
