"""Measures of claims about memory that need the state of each rank: of a parameter server, and of hybrids."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from hpc_parallel.report.gather import Row
from hpc_parallel.report.measures import (
    BACKED,
    CONTRADICTED,
    EVEN,
    FIGURE_NAMES,
    Evidence,
    Runs,
    in_one_unit,
    measured,
)
from hpc_parallel.report.rank_state import RankState, rank_states
from hpc_parallel.report.spread import NOISE

SERVER = "parameter_server"
SPLITTING_AXES = ("pipeline", "tensor")  # the product of their degrees is the number of parts of the model


def workers_hold_no_optimizer(runs: Runs) -> Evidence:
    for row, server, worker in _served(runs.rows):
        values = (worker.optimizer, "fullest worker"), (server.optimizer, f"server, {row.label}")
        figure = f"optimizer state: {in_one_unit('bytes', *values)}"
        if not server.optimizer:
            return Evidence(EVEN, figure)
        return Evidence(CONTRADICTED if worker.optimizer else BACKED, figure)
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
    if abs(a[0] - b[0]) <= NOISE * max(a[0], b[0]):
        return Evidence(EVEN, figure)
    return Evidence(BACKED if a[0] < b[0] else CONTRADICTED, figure)


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
    return Evidence(BACKED if x <= (1 + NOISE) * y else CONTRADICTED, figure)


def _stages(row: Row) -> int:
    return row.layout.get("pipeline", 1)


def _parts(row: Row) -> int:
    return math.prod(row.layout.get(axis, 1) for axis in SPLITTING_AXES)
