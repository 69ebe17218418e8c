"""Bubble against memory: how microbatches and schedules trade a pipeline's idle time for memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from hpc_parallel.config.batch_plan import plan_batch
from hpc_parallel.config.layout import Layout
from hpc_parallel.config.schedules import SCHEDULES
from hpc_parallel.report.drawing import Note, annotate, canvas, ink, short, spread, style
from hpc_parallel.report.figures import number
from hpc_parallel.report.gather import RUN_KEYS, SPEEDLESS, Row, identity
from hpc_parallel.report.tables import unit_of

CLOSED_FORM = ("gpipe", "1f1b", "naive")
MICROBATCHES = ("microbatches", "microbatch_size")


@dataclass(frozen=True)
class PipelineRun:
    """A run of a pipeline."""

    row: Row
    microbatches: int
    bubble_share: float
    peak_memory_bytes: float
    formula: float | None  # bubble share from the closed form of its schedule, if there is one


@dataclass(frozen=True)
class Family:
    """Runs that differ only in their number of microbatches, sorted by it."""

    label: str
    points: Sequence[PipelineRun]


def families(rows: Sequence[Row]) -> list[Family]:
    """The families of completed pipelines with both figures; empty if there is only one such run."""
    groups: dict[str, list[PipelineRun]] = defaultdict(list)
    for row in rows:
        if (point := _pipeline_run(row)) is not None:
            groups[_identity_without_microbatches(row)].append(point)
    if sum(map(len, groups.values())) < 2:
        return []
    return [
        Family(_label(points[0].row), sorted(points, key=lambda point: point.microbatches))
        for points in groups.values()
    ]


def closed_form(schedule: str, *, stages: int, microbatches: int) -> float | None:
    """The bubble share (P-1)/(M+P-1) of GPipe and 1F1B (Huang et al. 2019); None for other schedules.

    It assumes equal stages and links without cost. If microbatches run one after another, M is 1.
    """
    if schedule not in CLOSED_FORM:
        return None
    in_flight = 1 if SCHEDULES[schedule].in_turn else microbatches
    return (stages - 1) / (in_flight + stages - 1)


def _pipeline_run(row: Row) -> PipelineRun | None:
    share, memory = row.figures["bubble_share"], row.figures["peak_memory_bytes"]
    stages = row.layout.get("pipeline", 1)
    count = _microbatches(row)
    if not row.completed or stages < 2 or share is None or memory is None or memory <= 0 or count is None:
        return None
    formula = closed_form(_schedule(row), stages=stages, microbatches=count)
    return PipelineRun(row, count, share, memory, formula)


def _schedule(row: Row) -> str:
    return str(row.section("strategy").get("schedule"))


def _microbatches(row: Row) -> int | None:
    """The number of microbatches that the worker made of the global batch; None for an invalid file."""
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
    return f"{row.shape} {identity(config)}"


def _label(row: Row) -> str:
    """`1f1b, pipeline 4 x 1`, and other options in which the run differs."""
    excluded = tuple(f"{key}=" for key in (*MICROBATCHES, "schedule"))
    options = [option for option in row.differs if not option.startswith(excluded)]
    return ", ".join([_schedule(row), f"{row.strategy} {row.shape}", *options])


def figure(families: Sequence[Family]) -> Figure:
    """Plot bubble over memory for every run; hollow markers show the formula."""
    drawing, axes = canvas(4.6)
    points = [point for family in families for point in family.points]
    unit = unit_of("bytes", (point.peak_memory_bytes for point in points))
    notes = []
    for index, family in enumerate(families):
        curve_style = style(index)
        memory = [point.peak_memory_bytes / unit.size for point in family.points]
        shares = [100 * point.bubble_share for point in family.points]
        axes.plot(memory, shares, label=short(family.label), **curve_style)
        notes += [
            Note(x, share, str(point.microbatches))
            for x, share, point in zip(memory, shares, family.points, strict=True)
        ]
        formulas = [
            (x, 100 * point.formula)
            for x, point in zip(memory, family.points, strict=True)
            if point.formula is not None
        ]
        axes.plot(
            [x for x, _ in formulas], [share for _, share in formulas], color=curve_style["color"],
            marker=curve_style["marker"], linestyle="none", fillstyle="none",
        )  # fmt: skip
    spread(axes.xaxis, [point.peak_memory_bytes / unit.size for point in points],
           name=f"memory per device, {unit.name}")  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.set_ylabel("bubble, %")
    handles, labels = axes.get_legend_handles_labels()
    if any(point.formula is not None for point in points):
        handles.append(Line2D([], [], color=ink(), marker="o", linestyle="none", fillstyle="none"))
        labels.append("formula: (P-1)/(M+P-1)")
    drawing.legend(handles, labels, loc="outside lower left", ncols=2, fontsize=9)
    annotate(drawing, axes, notes)
    return drawing
