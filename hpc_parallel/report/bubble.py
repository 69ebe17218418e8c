"""Bubble against memory: how microbatches and schedules trade a pipeline's idle time for memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpc_parallel.failure.summary import SPEEDLESS
from hpc_parallel.layout.batch_plan import plan_batch
from hpc_parallel.layout.layout import Layout
from hpc_parallel.layout.schedules import SCHEDULES
from hpc_parallel.record.values import without
from hpc_parallel.report import picture
from hpc_parallel.report.figures import number
from hpc_parallel.report.gather import Row, identity
from hpc_parallel.report.labels import RUN_KEYS, legend
from hpc_parallel.report.tables import unit_of

CLOSED_FORM = ("gpipe", "1f1b", "naive")
MICROBATCHES = ("microbatches", "microbatch_size")
HOLLOW = {"linestyle": "none", "fillstyle": "none"}
FORMULA = picture.Curve((), {**HOLLOW, "color": picture.INK, "marker": "o"}, "formula: (P-1)/(M+P-1)")


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
    config = without(row.config, (*RUN_KEYS, "seed"))
    for name, excluded in (("training", (*SPEEDLESS, *MICROBATCHES)), ("strategy", MICROBATCHES)):
        config[name] = without(row.section(name), excluded)
    return f"{row.shape} {row.machine} {identity(config)}"


def _label(row: Row) -> Sequence[str]:
    """`1f1b`, `pipeline 4 x 1`, and other options in which the run differs."""
    excluded = tuple(f"{key}=" for key in (*MICROBATCHES, "schedule"))
    options = [option for option in row.names.options if not option.startswith(excluded)]
    return _schedule(row), f"{row.strategy} {row.shape}", *options


def pictures(rows: Sequence[Row]) -> Iterator[picture.Picture]:
    """Yields the bubble of every run over memory, or over microbatches if a run's memory is not known."""
    of_all = families(rows)
    if not of_all:
        return
    by_memory = all(point.peak_memory_bytes for family in of_all for point in family.points)
    yield picture.Picture(
        "bubble", "bubble", f"Bubble of pipelines, by {'memory' if by_memory else 'microbatches'}",
        "A point is a run with its number of microbatches. A line joins runs that differ only in this "
        "number. Hollow: the formula of the schedule, which is not a measurement. Better is down"
        + " and to the left" * by_memory + "." + picture.first_of(picture.MAX_CURVES, len(of_all)),
        _graphs(of_all[: picture.MAX_CURVES], by_memory=by_memory),
    )  # fmt: skip


def _graphs(families: Sequence[ScheduleFamily], *, by_memory: bool) -> picture.Graphs:
    unit = unit_of("bytes", (point.peak_memory_bytes for family in families for point in family.points))
    curves: list[picture.Curve] = []
    formulas: list[picture.Curve] = []
    for index, (text, family) in enumerate(zip(legend(one.words for one in families), families, strict=True)):
        shares, closed = [], []
        for point in family.points:
            x = (point.peak_memory_bytes or 0) / unit.size if by_memory else point.microbatches
            shares.append((x, 100 * point.bubble_share))
            closed += [] if point.formula is None else [(x, 100 * point.formula)]
        counts = [str(point.microbatches) for point in family.points]
        curves.append(picture.Curve(shares, picture.style(index), text, notes=counts))
        formulas += [picture.Curve(closed, picture.style(index, **HOLLOW))] * bool(closed)
    across = picture.PlotAxis(
        f"memory per device, {unit.name}" if by_memory else "microbatches", picture.SPREAD
    )
    graph = picture.Graph(across, picture.PlotAxis("bubble, %", picture.FROM_ZERO), [*curves, *formulas])
    return picture.Graphs([("", [graph])], 3.8, [FORMULA] * bool(formulas))
