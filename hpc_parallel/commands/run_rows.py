"""A row of `status`: the progress of a run, its speed and the time left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial

from hpc_parallel.config.script import TASK as SCRIPT
from hpc_parallel.failure.run_state import DAMAGED, RUNNING, State, despite_damage, states
from hpc_parallel.record.metrics_file import MetricsLine, duration, figure, per_second
from hpc_parallel.record.names import label
from hpc_parallel.record.rank_output import last_output
from hpc_parallel.record.recorded import RecordedRun
from hpc_parallel.record.recorded_slow_ranks import slow_lines
from hpc_parallel.record.values import integer, number, table


@dataclass(frozen=True)
class RunRow:
    """One run. None: unknown, or the task has no such value.

    time_left_s follows the newest step time; job_left_s is the time until Slurm's limit. last_line: the
    newest line that rank 0 has printed, escaped; only while the run is going on.
    """

    run: str
    path: str
    strategy: str | None
    nodes: int | None
    gpus_per_node: int | None
    state: str
    reason: str
    ended: bool
    step: int | None
    steps: int | None
    loss: float | None
    samples_per_s: float | None
    time_left_s: float | None
    job_left_s: float | None
    restarts: int
    job_id: str | None
    failure: str | None  # the line that names the root cause
    last_line: str | None
    damaged: Mapping[str, str]  # the damaged ones of the files read so far, each with the reason


HEADINGS = (
    "run", "strategy", "nodes x devices", "state", "step", "loss", "samples/s", "left", "restarts", "job",
)  # fmt: skip
RIGHT = ("step", "loss", "samples/s", "left", "restarts")


def rows_of(runs: Sequence[RecordedRun]) -> list[RunRow]:
    return [
        despite_damage(partial(row_of, run, state), partial(_damaged_row, run, state))
        for run, state in zip(runs, states(runs), strict=True)
    ]


def _damaged_row(run: RecordedRun, state: State, reason: str) -> RunRow:
    unknown = dict.fromkeys(field.name for field in fields(RunRow))
    return RunRow(**{
        **unknown, "run": label(run.path), "path": str(run.path), "state": DAMAGED, "reason": reason,
        "ended": state.ended, "restarts": 0, "job_id": state.job, "damaged": run.noticed,
    })  # type: ignore[arg-type]  # fmt: skip


def row_of(run: RecordedRun, state: State) -> RunRow:
    last, steps = run.newest_line, total_steps(run, state)
    rate = run.totals.samples_per_s if state.ended else None
    if rate is None and last is not None:
        rate = last.samples_per_s
    return RunRow(
        run=label(run.path),
        path=str(run.path),
        strategy=run.strategy,
        nodes=run.nodes,
        gpus_per_node=run.gpus_per_node,
        state=state.name,
        reason=state.reason or _slow(run, state),
        ended=state.ended,
        step=None if last is None else last.step,
        steps=steps,
        loss=None if last is None else last.loss,
        samples_per_s=rate,
        time_left_s=_left_s(last, steps) if state.name == RUNNING else None,
        job_left_s=state.left_s,
        restarts=run.attempts.restarts,
        job_id=state.job,
        failure=failure_line(run) if state.name == "failed" else None,
        last_line=None if state.ended else last_output(run.folder),
        damaged=run.noticed,
    )


def _left_s(last: MetricsLine | None, steps: int | None) -> float | None:
    if last is None or last.step_time_s is None or steps is None:
        return None
    return number(max(0, steps - last.step) * last.step_time_s)


def _slow(run: RecordedRun, state: State) -> str:
    """The slowest rank of a run that is going on, and the cause; empty if none is slow."""
    lines = slow_lines(run.folder) if state.name == RUNNING else []
    return lines[0].partition(" takes ")[0] if lines else ""


def total_steps(run: RecordedRun, state: State) -> int | None:
    """The last step that the run will have; for an ended run that trained nothing, its last step."""
    if run.task in ("train", "proof"):
        return integer(table(run.head.get("training")).get("steps"))
    if run.task == SCRIPT or state.ended or run.config is None:
        last = run.newest_line if state.name == "completed" else None
        return None if last is None else last.step
    from hpc_parallel.config import tasks, typed_config  # this import takes 0.2 s

    try:
        return tasks.total_steps(typed_config.typed(run.config))
    except Exception:  # the configuration is of another version, or was changed
        return None


def failure_line(run: RecordedRun) -> str | None:
    return None if run.root_cause is None else run.root_cause.line


def cells(row: RunRow) -> tuple[str, ...]:
    """The texts of a row, in the order of HEADINGS."""
    state = row.state + (f" ({row.reason})" if row.reason else "")
    shape = f"{_or_question_mark(row.nodes)} x {_or_question_mark(row.gpus_per_node)}"
    step = "" if row.step is None and row.steps is None else f"{row.step or 0}/{_or_question_mark(row.steps)}"
    return (
        row.run,
        row.strategy or "?",
        shape,
        state,
        step,
        "" if row.loss is None else figure(row.loss),
        "" if row.samples_per_s is None else per_second(row.samples_per_s),
        _left(row),
        str(row.restarts or ""),
        row.job_id or "",
    )


def _left(row: RunRow) -> str:
    """The time that the remaining steps take. If it is not known, the time until the limit of the job."""
    if row.time_left_s is not None:
        return duration(row.time_left_s)
    return "" if row.job_left_s is None else f"< {duration(row.job_left_s)}"


def count_states(rows: Sequence[RunRow]) -> Mapping[str, int]:
    """The number of runs in each state, the most frequent state first."""
    return dict(Counter(row.state for row in rows).most_common())


def _or_question_mark(value: int | None) -> str:
    return "?" if value is None else str(value)
