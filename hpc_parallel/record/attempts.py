"""The starts of a run and how each ended: `attempts.jsonl`, one object for each event.

A run may start many times: after a time limit, a preemption or a failure, or when a user resumes it.
Each start continues from the newest checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from hpc_parallel.record.metrics_file import MetricsReader, last_line
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import open_regular, read_lines
from hpc_parallel.record.safe_write import append_line, write_bytes
from hpc_parallel.record.time_use import energy_use, newest, seconds_after, time_use, work_of_killed
from hpc_parallel.record.typed import build
from hpc_parallel.record.values import flatten, job_id
from hpc_parallel.slurm.jobs import job_of


@dataclass(frozen=True)
class Start:
    """A start, which continues after a step."""

    began: str  # ISO 8601, UTC
    job_id: Annotated[str, job_id] | None
    after_step: int | None
    lost_steps: int  # steps that this start trains again
    warnings: tuple[str, ...] = ()  # about damaged checkpoints
    layout: Mapping[str, Any] = field(default_factory=dict)  # `summary.computed_as`
    spent_s: Mapping[str, float] = field(default_factory=dict)  # `repeated`: what the lost steps took


@dataclass(frozen=True)
class End:
    """How a start ended early, and on which host.

    how: `time_limit`, `preempted`, `cancelled`, or the kind of the failure. A start that completed has no
    such record: the summary describes it. exclude: hosts that the next start leaves out. rank: the one that
    failed first. step: the last one that was logged or saved. line: the cause. Those without a value are not
    written.
    """

    ended: str  # ISO 8601, UTC
    how: str
    host: str | None
    exclude: tuple[str, ...] = ()
    rank: int | None = None
    step: int | None = None
    line: str | None = None


@dataclass(frozen=True)
class History:
    """The entries of `summary.json` about starts."""

    restarts: int = 0
    lost_steps: int = 0
    layout_after_step: int = 0  # the newest layout trains after this step
    started: str | None = None  # ISO 8601, UTC; None before the first start
    job_ids: tuple[str, ...] = ()  # Slurm's job ids, in order
    time_use_s: Mapping[str, float] = field(default_factory=dict)  # seconds by cause (`time_use.CAUSES`)
    energy: Mapping[str, float] = field(default_factory=dict)  # `time_use.energy_use`


def begin(
    folder: RunFolder,
    *,
    step: int,
    environment: Mapping[str, str],
    warnings: Sequence[str] = (),
    layout: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Record a start that continues after `step`, and remove the metrics of later steps.

    The run will train the later steps again.

    environment: Slurm's variables; warnings: about damaged checkpoints; layout: `summary.computed_as`.
    """
    _note_work_of_killed(folder, kept_step=step)
    lost, spent_s = keep_metrics(folder, until=step)
    job = job_of(environment)
    start = Start(_now(), job, step, max(0, lost), tuple(warnings), dict(layout), spent_s)
    append_line(folder.attempts, _without_empty(start, "layout", "spent_s"))


def note(folder: RunFolder, event: str, **values: Any) -> None:
    """Record when a run was `submitted`, its job or agent was `launched`, or its ranks have `worked` last.

    `resumed`: a user started the run again. Automatic restarts are counted from there.
    """
    append_line(folder.attempts, {event: _now(), **values})


def _note_work_of_killed(folder: RunFolder, *, kept_step: int) -> None:
    """Record what the start before this one spent, if it could not do so itself."""
    events = read_lines(folder.attempts)
    while events and not events[-1].keys().isdisjoint({"submitted", "resumed", "launched"}):
        events.pop()  # of this start
    began = newest(events, "began")
    if began is not None and newest(events, "worked") is None:
        lines, ended = MetricsReader(folder.metrics).read(), newest(events, "ended")
        append_line(folder.attempts, work_of_killed(lines, began=began, ended=ended, kept_step=kept_step))


def keep_metrics(folder: RunFolder, *, until: int) -> tuple[int, dict[str, float]]:
    """Remove the metrics of steps after `until`; returns the number of these steps, and what they took."""
    lines = MetricsReader(folder.metrics).read()
    kept = [line for line in lines if line["step"] <= until]
    content = "".join(json.dumps(line) + "\n" for line in kept).encode()
    if content != _content(folder.metrics):  # the file has lines of later steps, or a torn line
        write_bytes(folder.metrics, content)
    lost = max([line["step"] for line in lines], default=until) - until
    repeated_s = seconds_after(lines, step=until)
    return lost, {"repeated": repeated_s} if repeated_s else {}


def end(folder: RunFolder, *, how: str, host: str | None = None, **known: Any) -> None:
    """Record how the newest start ended early. known: further fields of `End`."""
    append_line(
        folder.attempts, _without_empty(End(_now(), how, host, **known), "exclude", "rank", "step", "line")
    )


def recent_ends(folder: RunFolder) -> list[End]:
    """The ends of starts since a user last started the run."""
    lines = read_lines(folder.attempts)
    last_resume = max((index for index, line in enumerate(lines) if "resumed" in line), default=-1)
    return [end for line in lines[last_resume + 1 :] if (end := _end(line))]


def is_starting(folder: RunFolder) -> bool:
    """Whether no rank of the newest start has begun."""
    events = [
        line for line in read_lines(folder.attempts) if not line.keys().isdisjoint({"launched", "began"})
    ]
    return not events or "launched" in events[-1]


def is_queued(folder: RunFolder) -> bool:
    """Whether the newest record is that a user started the run: its job has recorded nothing yet."""
    events = read_lines(folder.attempts)
    return not events or not events[-1].keys().isdisjoint({"submitted", "resumed"})


def earlier_starts(folder: RunFolder) -> int:
    """The number of starts before the current one. The current start may not have recorded its begin yet.

    Before every start except the first, the file has an end, a record that a user started the run again, or
    both.
    """
    by_hand = ["resumed" in line for line in read_lines(folder.attempts) if "resumed" in line or _end(line)]
    return sum(this or not following for this, following in pairwise([*by_hand, False]))


def starts(folder: RunFolder) -> list[Start]:
    """The records of all starts. Raises DamagedError."""
    return _starts(read_lines(folder.attempts))


def _starts(lines: Sequence[dict[str, Any]]) -> list[Start]:
    records = (build(Start, line) for line in lines)
    return [start for start in records if start is not None and start.began]


def ends(folder: RunFolder) -> list[End]:
    """The records of all ends. Raises DamagedError."""
    return [end for line in read_lines(folder.attempts) if (end := _end(line))]


def ends_before_start(folder: RunFolder) -> list[End]:
    """The records of all ends after which another start follows. Raises DamagedError."""
    lines = read_lines(folder.attempts)
    if any(file.exists() for file in folder.outcome):  # the newest end is being written, or was the last
        lines = lines[: max((index for index, line in enumerate(lines) if "launched" in line), default=0)]
    return [end for line in lines if (end := _end(line))]


def history(
    folder: RunFolder,
    *,
    environment: Mapping[str, str] = MappingProxyType({}),
    until: datetime | None = None,
    layout: Mapping[str, Any] | None = None,
) -> History:
    """A summary of all starts.

    environment, layout: Slurm's variables and the layout of a start that may have ended, or may wait, before
    it could record itself; until: up to when the use of time is of interest.

    Raises DamagedError.
    """
    lines = read_lines(folder.attempts)
    records = _starts(lines)
    launches = sum("launched" in line for line in lines)  # some end before they begin
    jobs = [*(record.job_id for record in records), job_of(environment)]
    return History(
        restarts=max(0, len(records) - 1, launches - 1),
        lost_steps=sum(record.lost_steps for record in records),
        layout_after_step=_layout_after_step(folder, records, layout),
        started=records[0].began if records else None,
        job_ids=tuple(dict.fromkeys(job for job in jobs if job)),
        time_use_s={} if until is None else _use(folder, time_use, until=until),
        energy={} if until is None else _use(folder, energy_use, until=until),
    )


def _layout_after_step(folder: RunFolder, records: Sequence[Start], layout: Mapping[str, Any] | None) -> int:
    """The first step from which a start with the newest layout continued."""
    if records and layout is not None and records[-1].layout and _differ(records[-1].layout, layout):
        return int((_last_line(folder) or {}).get("step", 0))  # it has trained no step yet
    changes = [
        at for at, (before, after) in enumerate(pairwise(records), 1) if _differ(before.layout, after.layout)
    ]
    return min((record.after_step or 0 for record in records[changes[-1] :]), default=0) if changes else 0


def _differ(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether two starts differ in a value that both have recorded, or only one has recorded any."""
    one, other = flatten(before), flatten(after)
    return bool(one) != bool(other) or any(one[key] != other[key] for key in one.keys() & other.keys())


def _use(folder: RunFolder, use: Callable[..., dict[str, float]], *, until: datetime) -> dict[str, float]:
    return use(read_lines(folder.attempts), last_line=_last_line(folder), until=until)


def _last_line(folder: RunFolder) -> dict[str, Any] | None:
    with suppress(FileNotFoundError):
        return last_line(folder.metrics)
    return None


def _end(line: Mapping[str, Any]) -> End | None:
    end = build(End, line)
    return end if end is not None and end.ended and end.how else None


def _without_empty(record: Start | End, *optional: str) -> dict[str, Any]:
    """The fields of a record; the optional ones only if they are known."""
    unknown: tuple[Any, ...] = ((), [], {}, None)
    return {
        key: value for key, value in asdict(record).items() if key not in optional or value not in unknown
    }


def _now() -> str:
    return datetime.now(UTC).isoformat()


def _content(path: Path) -> bytes:
    """The content of the file. The run belongs to this user, so the length of the file is not limited."""
    try:
        with open_regular(path) as file:
            return file.read()
    except FileNotFoundError:
        return b""
