"""Bubble against memory: what more microbatches, or another schedule, win of a pipeline's idle time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from hpc_parallel.config.layout import Layout, plan_batch
from hpc_parallel.config.schedules import SCHEDULES
from hpc_parallel.report.drawing import Note, annotate, canvas, ink, short, spread, style
from hpc_parallel.report.gather import BESIDE, SPEEDLESS, Row, identity, number
from hpc_parallel.report.tables import unit_of

CLOSED_FORM = ("gpipe", "1f1b", "naive")
MICROBATCHES = ("microbatches", "microbatch_size")


@dataclass(frozen=True)
class Piped:
    """A run of a pipeline. `formula`: the bubble share by its schedule's closed form, None without one."""

    row: Row
    microbatches: int
    bubble_share: float
    peak_memory_bytes: float
    formula: float | None


@dataclass(frozen=True)
class Family:
    """Runs that differ in their number of microbatches alone, by that."""

    label: str
    points: Sequence[Piped]


def families(rows: Sequence[Row]) -> list[Family]:
    """Of all completed pipelines with both figures; none where there is no second run to compare with."""
    found: dict[str, list[Piped]] = defaultdict(list)
    for row in rows:
        if (point := _piped(row)) is not None:
            found[_but_for_microbatches(row)].append(point)
    if sum(map(len, found.values())) < 2:
        return []
    return [
        Family(_label(points[0].row), sorted(points, key=lambda point: point.microbatches))
        for points in found.values()
    ]


def closed_form(schedule: str, *, stages: int, microbatches: int) -> float | None:
    """(P-1)/(M+P-1) of GPipe and 1F1B, with equal stages and free links (Huang et al. 2019); where
    microbatches go in turn, as if there were one. None of schedules that have no such form."""
    if schedule not in CLOSED_FORM:
        return None
    at_once = 1 if SCHEDULES[schedule].in_turn else microbatches
    return (stages - 1) / (at_once + stages - 1)


def _piped(row: Row) -> Piped | None:
    share, memory = row.figures["bubble_share"], row.figures["peak_memory_bytes"]
    stages = row.layout.get("pipeline", 1)
    count = _microbatches(row)
    if not row.completed or stages < 2 or share is None or memory is None or memory <= 0 or count is None:
        return None
    formula = closed_form(_schedule(row), stages=stages, microbatches=count)
    return Piped(row, count, share, memory, formula)


def _schedule(row: Row) -> str:
    return str(row.section("strategy").get("schedule"))


def _microbatches(row: Row) -> int | None:
    """As many as the worker made of the global batch; None where a stranger's configuration says no such."""
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


def _but_for_microbatches(row: Row) -> str:
    config = {key: value for key, value in row.config.items() if key not in (*BESIDE, "seed")}
    for name, left_out in (("training", (*SPEEDLESS, *MICROBATCHES)), ("strategy", MICROBATCHES)):
        config[name] = {key: value for key, value in row.section(name).items() if key not in left_out}
    return f"{row.shape} {identity(config)}"


def _label(row: Row) -> str:
    """`1f1b, pipeline 4 x 1` and what else sets it apart."""
    left_out = tuple(f"{key}=" for key in (*MICROBATCHES, "schedule"))
    apart = [said for said in row.differs if not said.startswith(left_out)]
    return ", ".join([_schedule(row), f"{row.strategy} {row.shape}", *apart])


def figure(found: Sequence[Family]) -> Figure:
    """Every run by its memory and its bubble, and what the formula says of it in hollow."""
    drawn, axes = canvas(4.6)
    every = [point for family in found for point in family.points]
    unit = unit_of("bytes", (point.peak_memory_bytes for point in every))
    notes = []
    for place, family in enumerate(found):
        look = style(place)
        memory = [point.peak_memory_bytes / unit.size for point in family.points]
        shares = [100 * point.bubble_share for point in family.points]
        axes.plot(memory, shares, label=short(family.label), **look)
        notes += [
            Note(at, share, str(point.microbatches))
            for at, share, point in zip(memory, shares, family.points, strict=True)
        ]
        formulas = [
            (at, 100 * point.formula)
            for at, point in zip(memory, family.points, strict=True)
            if point.formula is not None
        ]
        axes.plot(
            [at for at, _ in formulas], [share for _, share in formulas], color=look["color"],
            marker=look["marker"], linestyle="none", fillstyle="none",
        )  # fmt: skip
    spread(axes.xaxis, [point.peak_memory_bytes / unit.size for point in every],
           name=f"memory per device, {unit.name}")  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.set_ylabel("bubble, %")
    handles, labels = axes.get_legend_handles_labels()
    if any(point.formula is not None for point in every):
        handles.append(Line2D([], [], color=ink(), marker="o", linestyle="none", fillstyle="none"))
        labels.append("formula: (P-1)/(M+P-1)")
    drawn.legend(handles, labels, loc="outside lower left", ncols=2, fontsize=9)
    annotate(drawn, axes, notes)
    return drawn
