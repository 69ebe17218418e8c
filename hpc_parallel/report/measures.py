"""Measures that judge a claim by the figures of the runs of a report.

Those about the memory of a parameter server and of hybrids need the state of each rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_parallel.record.endings import RankState
from hpc_parallel.report.figures import NOISE, meet, rank_states
from hpc_parallel.report.gather import Row
from hpc_parallel.report.tables import COLUMNS, Series, are_even, digits, spread_text, unit_of

BACKED, CONTRADICTED, EVEN, OPEN = "backed", "contradicted", "no difference seen", "not measured here"
NO_VERDICT = "no verdict on a CPU"  # the memory includes the interpreter, libraries and malloc's cache
ONE_MACHINE = "no verdict: one machine"  # the run's nodes are processes on the same host
NO_FIGURE = "no figure decides it"  # the verdict on a claim without a measure
MUCH = 0.1  # share of a step that counts as a high overhead
CLOSE_TO_IDEAL = 0.8  # smallest efficiency that counts as "n times as fast"
FEW_DEVICES = 8  # largest number of devices for the claim of near-ideal speed-up
FIGURE_NAMES = {  # key -> name, kind of unit
    **{column.key: (column.title, column.kind) for column in COLUMNS},
    "state_bytes": ("weights, gradients and optimizer state per device", "bytes"),
    # Seconds, because shares would compare steps of unequal length.
    "exposed_communication_s": ("exposed communication of a step", "seconds"),
    "busiest_rank_traffic_bytes": ("traffic of the busiest rank", "bytes"),
}
SERVER = "parameter_server"
SPLITTING_AXES = ("pipeline", "tensor")  # the product of their degrees is the number of parts of the model


@dataclass(frozen=True)
class Evidence:
    """The verdict on a claim (OPEN: the figure is missing), and the measured figure as text."""

    verdict: str = OPEN
    figure: str = ""


def _judged(figure: str, *, backed: bool, even: bool = False) -> Evidence:
    return Evidence(EVEN if even else BACKED if backed else CONTRADICTED, figure)


@dataclass(frozen=True)
class Runs:
    """The runs of a report."""

    rows: Sequence[Row]
    series: Sequence[Series]


Measure = Callable[[Runs], Evidence]


def versus(strategy: str, other: str, key: str, *, more: bool) -> Measure:
    """Whether one strategy has a larger (or smaller) figure than another.

    Runs of the same work on the same number of devices are compared. The pair with the most devices counts.
    """

    def measure(runs: Runs) -> Evidence:
        pairs = [
            (a, b)
            for a in measured(runs.rows, strategy, key)
            for b in measured(runs.rows, other, key)
            if a.settings == b.settings and (a.devices == b.devices or other == "single")
        ]
        if not pairs:
            return Evidence()
        a, b = max(pairs, key=lambda pair: pair[0].devices or 0)
        figure = _against(key, a, b)
        if key == "peak_memory_bytes" and (a.on_cpu or b.on_cpu):
            return Evidence(NO_VERDICT, figure)
        backed = (_value(key, a) > _value(key, b)) == more
        return _judged(figure, backed=backed, even=are_even(key, a, b, noise=NOISE))

    return measure


def slower_across_machines(runs: Runs) -> Evidence:
    """Whether n machines with one device each have less throughput than one machine with n devices."""
    key = "samples_per_s"
    rows = [row for row in measured(runs.rows, "data", key) if (row.devices or 0) > 1]
    pairs = [
        (across, inside)
        for across in rows
        for inside in rows
        if across.run.gpus_per_node == 1 and inside.run.nodes == 1
        if (across.settings, across.layout) == (inside.settings, inside.layout)
    ]
    if not pairs:
        return Evidence()
    across, inside = max(pairs, key=lambda pair: pair[0].devices or 0)
    figure = _against(key, across, inside)
    if across.hosts < (across.run.nodes or 0):
        return Evidence(ONE_MACHINE, figure)
    backed = _value(key, across) < _value(key, inside)
    return _judged(figure, backed=backed, even=are_even(key, across, inside, noise=NOISE))


def _value(key: str, row: Row) -> float:
    return row.figures[key] or 0.0


def _against(key: str, a: Row, b: Row) -> str:
    """The figure of two runs as text."""
    name, kind = FIGURE_NAMES[key]
    names = (", ".join(filter(None, (row.label, spread_text(row, key)))) for row in (a, b))
    values = zip((_value(key, a), _value(key, b)), names, strict=True)
    return f"{name}: {in_one_unit(kind, *values)}"


def in_one_unit(kind: str, *values: tuple[float, str]) -> str:
    """Values, each with the name of what has it: `4.00 MB (worker) against 8.00 MB (server)`."""
    unit = unit_of(kind, (value for value, _ in values))
    return " against ".join(f"{unit.show(value)} {unit.name} ({name})" for value, name in values)


def level(strategy: str, key: str) -> Measure:
    """Whether a share of the step is a high overhead in the strategy's run on most devices."""

    def measure(runs: Runs) -> Evidence:
        rows = [row for row in measured(runs.rows, strategy, key) if row.processes > 1]
        if not rows:
            return Evidence()
        row = max(rows, key=lambda row: row.devices or 0)
        value = row.figures[key] or 0.0
        name, kind = FIGURE_NAMES[key]
        unit = unit_of(kind, (value,))
        figure = (
            f"{name}: {unit.show(value)} % ({row.label}); {digits(100 * MUCH, 2)} % or more would be much"
        )
        return _judged(figure, backed=value >= MUCH)

    return measure


def near_ideal(runs: Runs) -> Evidence:
    """Whether the throughput of replicas grows nearly in proportion to devices, up to FEW_DEVICES."""
    points = [
        (point, series)
        for series in runs.series
        if series.points[0].runs[0].strategy == "data"
        for point in series.points[1:]
        if point.devices <= FEW_DEVICES
    ]
    if not points:
        return Evidence()
    point, series = max(points, key=lambda pair: (pair[0].devices, pair[0].efficiency))
    figure = (
        f"efficiency {point.efficiency:.0%} on {point.devices} devices, from {series.points[0].devices} "
        f"({series.kind} scaling, {series.label}); {CLOSE_TO_IDEAL:.0%} would be close"
    )
    return _judged(figure, backed=point.efficiency >= CLOSE_TO_IDEAL)


def workers_near_ideal(runs: Runs) -> Evidence:
    """Whether n workers, up to FEW_DEVICES, are nearly n times as fast as one device on the same batch."""
    pairs = [
        (row, single)
        for row in measured(runs.rows, SERVER, "samples_per_s")
        for single in measured(runs.rows, "single", "samples_per_s")
        if row.settings == single.settings
        and 1 < workers(row) <= FEW_DEVICES
        and single.figures["samples_per_s"]
    ]
    if not pairs:
        return Evidence()
    row, single = max(pairs, key=lambda pair: workers(pair[0]))
    speedup = (row.figures["samples_per_s"] or 0.0) / (single.figures["samples_per_s"] or 1.0)
    efficiency = speedup / workers(row)
    figure = (
        f"efficiency {efficiency:.0%} with {workers(row)} workers ({row.label}), from one device "
        f"({single.label}); {CLOSE_TO_IDEAL:.0%} would be close"
    )
    return _judged(figure, backed=efficiency >= CLOSE_TO_IDEAL)


def workers(row: Row) -> int:
    """The number of devices that compute, without a dedicated server."""
    return math.prod(row.layout.values()) if row.layout else 0


def ahead_of_all(strategy: str, key: str, *, best: Callable[..., Any]) -> Measure:
    """Whether a strategy is the best of all strategies on the same number of devices."""

    def measure(runs: Runs) -> Evidence:
        for row in sorted(measured(runs.rows, strategy, key), key=lambda row: -(row.devices or 0)):
            rivals = [
                rival
                for other in {row.strategy for row in runs.rows} - {strategy}
                for rival in measured(runs.rows, other, key)
                if rival.devices == row.devices and row.settings == rival.settings and not rival.is_alike(row)
            ]
            if rivals:
                first = best(rivals, key=lambda rival: rival.figures[key])
                x, y = _value(key, row), _value(key, first)
                name, kind = FIGURE_NAMES[key]
                unit = unit_of(kind, (x, y))
                figure = f"{name}: {unit.show(x)} {unit.name} ({row.label}), "
                figure += f"best of the others {unit.show(y)} {unit.name} ({first.label})"
                return _judged(figure, backed=best(x, y) == x, even=are_even(key, row, first, noise=NOISE))
        return Evidence()

    return measure


def measured(rows: Sequence[Row], strategy: str, key: str) -> list[Row]:
    return [
        row
        for row in rows
        if row.completed
        and row.strategy == strategy
        and row.figures[key] is not None
        and (row.processes > 1 or not key.startswith("exposed_communication"))
    ]


def workers_hold_no_optimizer(runs: Runs) -> Evidence:
    for row, server, worker in _served(runs.rows):
        values = (worker.optimizer, "fullest worker"), (server.optimizer, f"server, {row.label}")
        figure = f"optimizer state: {in_one_unit('bytes', *values)}"
        return _judged(figure, backed=not worker.optimizer, even=not server.optimizer)
    return Evidence()


def workers_hold_less_than_the_server(runs: Runs) -> Evidence:
    for row, server, worker in _served(runs.rows):
        return _holds_less((worker.total, "fullest worker"), (server.total, f"server, {row.label}"))
    return Evidence()


def workers_hold_less_than_a_replica(runs: Runs) -> Evidence:
    for row, _, worker in _served(runs.rows):
        for replica in measured(runs.rows, "data", "state_bytes"):
            if replica.settings == row.settings and replica.devices == row.devices:
                total = replica.figures["state_bytes"] or 0.0
                values = (worker.total, f"fullest worker, {row.label}"), (total, f"replica, {replica.label}")
                return _holds_less(*values)
    return Evidence()


def _served(rows: Sequence[Row]) -> Iterator[tuple[Row, RankState, RankState]]:
    """Each run of a parameter server, with its server and the worker that holds most; most devices first."""
    for row in sorted(measured(rows, SERVER, "state_bytes"), key=lambda row: -(row.devices or 0)):
        server, *others = rank_states(row.run.totals)
        if others:
            yield row, server, max(others, key=lambda state: state.total)


def _holds_less(a: tuple[float, str], b: tuple[float, str]) -> Evidence:
    name, kind = FIGURE_NAMES["state_bytes"]
    figure = f"{name}: {in_one_unit(kind, a, b)}"
    return _judged(figure, backed=a[0] < b[0], even=meet((a[0], a[0]), (b[0], b[0]), noise=NOISE))


def hybrid_keeps_memory(runs: Runs) -> Evidence:
    """Whether a hybrid's fullest device holds no more than the fullest device of model parallelism.

    The model-parallel run has as many parts as the hybrid has parts or stages. The hybrid's parts are its
    stages times the parts of each layer; replicas split nothing.
    """
    name, kind = FIGURE_NAMES["state_bytes"]
    pairs = [
        (hybrid, other)
        for hybrid in measured(runs.rows, "hybrid", "state_bytes")
        for strategy in ("model", "pipeline")
        for other in measured(runs.rows, strategy, "state_bytes")
        if hybrid.workload == other.workload and _parts(other) in (_parts(hybrid), _stages(hybrid))
        if _parts(other) == _stages(other) > 1 and math.prod(hybrid.layout.values()) > _stages(hybrid)
    ]
    if not pairs:
        return Evidence()
    hybrid, other = max(pairs, key=lambda pair: (_parts(pair[1]), pair[0].devices or 0))
    x, y = (row.figures["state_bytes"] or 0.0 for row in (hybrid, other))
    figure = f"{name}: {in_one_unit(kind, (x, hybrid.label), (y, other.label))}"
    return _judged(figure, backed=x <= (1 + NOISE) * y)


def _stages(row: Row) -> int:
    return row.layout.get("pipeline", 1)


def _parts(row: Row) -> int:
    return math.prod(row.layout.get(axis, 1) for axis in SPLITTING_AXES)
