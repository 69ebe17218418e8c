"""A line of `status`: how far a run is, how fast, how long it still takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpc_parallel.launch.metrics_file import per_second
from hpc_parallel.launch.names import label
from hpc_parallel.launch.recorded import RecordedRun, number, whole
from hpc_parallel.operate.state import RUNNING, State, states


@dataclass(frozen=True)
class Row:
    """None: not known, or not of this task. `step` of `steps`; `time_left_s` at the newest pace."""

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
    restarts: int
    job_id: str | None
    failure: str | None  # its one line


HEADINGS = (
    "run", "strategy", "nodes x devices", "state", "step", "loss", "samples/s", "left", "restarts", "job",
)  # fmt: skip
RIGHT = ("step", "loss", "samples/s", "left", "restarts")


def rows_of(runs: Sequence[RecordedRun]) -> list[Row]:
    return [row_of(run, state) for run, state in zip(runs, states(runs), strict=True)]


def row_of(run: RecordedRun, state: State) -> Row:
    last, summary = run.last_metrics or {}, run.summary or {}
    step, steps = whole(last.get("step")), total_steps(run, state)
    pace_s = number(last.get("step_time_s"))
    left_s = None
    if state.word == RUNNING and step is not None and steps is not None and pace_s is not None:
        left_s = max(0, steps - step) * pace_s
    rate = summary.get("samples_per_s") if state.ended else None
    return Row(
        run=label(run.path),
        path=str(run.path),
        strategy=run.strategy,
        nodes=run.nodes,
        gpus_per_node=run.gpus_per_node,
        state=state.word,
        reason=state.reason,
        ended=state.ended,
        step=step,
        steps=steps,
        loss=number(last.get("loss")),
        samples_per_s=number(rate if rate is not None else last.get("samples_per_s")),
        time_left_s=left_s,
        restarts=run.attempts["restarts"],
        job_id=state.job,
        failure=failure_line(run) if state.word == "failed" else None,
    )


def total_steps(run: RecordedRun, state: State) -> int | None:
    """How many steps the metrics count to; of an ended run that trained nothing, as many as it has."""
    if run.task in ("train", "proof"):
        training = run.head.get("training")
        return whole(training.get("steps")) if isinstance(training, dict) else None
    if state.ended or run.config is None:
        return whole((run.last_metrics or {}).get("step")) if state.word == "completed" else None
    from hpc_parallel.config import schema, tasks  # takes a fifth of a second

    try:
        return tasks.total_steps(schema.typed(run.config))
    except Exception:  # an older version's keys, say: what OmegaConf raises is of many classes
        return None


def failure_line(run: RecordedRun) -> str | None:
    line = (run.failure or {}).get("line")
    return line if isinstance(line, str) else None


def cells(row: Row) -> tuple[str, ...]:
    """As HEADINGS."""
    state = row.state + (f" ({row.reason})" if row.reason else "")
    shape = f"{_shown(row.nodes)} x {_shown(row.gpus_per_node)}"
    step = "" if row.step is None and row.steps is None else f"{row.step or 0}/{_shown(row.steps)}"
    return (
        row.run,
        row.strategy or "?",
        shape,
        state,
        step,
        "" if row.loss is None else f"{row.loss:.4g}",
        "" if row.samples_per_s is None else per_second(row.samples_per_s),
        "" if row.time_left_s is None else duration(row.time_left_s),
        str(row.restarts or ""),
        row.job_id or "",
    )


def duration(seconds: float) -> str:
    """`42 s`, `3 min 20 s`, `5 h 7 min`, `2 d 3 h`: the two largest units."""
    whole = round(seconds)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"


def counted(rows: Sequence[Row]) -> Mapping[str, int]:
    """Runs in each state, the most frequent first."""
    return dict(Counter(row.state for row in rows).most_common())


def _shown(value: int | None) -> str:
    return "?" if value is None else str(value)
