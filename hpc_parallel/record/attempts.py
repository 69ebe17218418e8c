"""The starts of a run and how each ended: `attempts.jsonl`, one object per start or end.

A run may start many times: after a time limit, a preemption or a failure, or when a user resumes it.
Each start continues from the newest checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hpc_parallel.record.metrics_file import MetricsReader
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import open_regular, read_lines
from hpc_parallel.record.safe_write import append_line, write_bytes
from hpc_parallel.record.values import integer, job_id, text, texts
from hpc_parallel.slurm.jobs import job_of


def begin(
    folder: RunFolder, *, step: int, environment: Mapping[str, str], warnings: Sequence[str] = ()
) -> None:
    """Record a start that continues after `step`, and remove the metrics of later steps.

    The run will train the later steps again.

    environment: Slurm's variables; warnings: about damaged checkpoints.
    """
    lost = keep_metrics(folder, until=step)
    _append(
        folder,
        {
            "began": datetime.now(UTC).isoformat(),
            "job_id": job_of(environment),
            "after_step": step,
            "lost_steps": max(0, lost),
            "warnings": list(warnings),
        },
    )


def keep_metrics(folder: RunFolder, *, until: int) -> int:
    """Remove the metrics of steps after `until`; returns how many steps that are."""
    lines = MetricsReader(folder.metrics).read()
    kept = [line for line in lines if line["step"] <= until]
    content = "".join(json.dumps(line) + "\n" for line in kept).encode()
    if content != _content(folder.metrics):  # the file has lines of later steps, or a torn line
        write_bytes(folder.metrics, content)
    return max([line["step"] for line in lines], default=until) - until


def end(folder: RunFolder, *, how: str, host: str | None = None, exclude: Sequence[str] = ()) -> None:
    """Record how and on which host the newest start ended early.

    how: `time_limit`, `preempted`, `cancelled`, or the kind of the failure. A start that completed has no
    such record: the summary describes it. exclude: hosts that the next start leaves out.
    """
    line = {"ended": datetime.now(UTC).isoformat(), "how": how, "host": host}
    _append(folder, line | ({"exclude": list(exclude)} if exclude else {}))


def accused_hosts(end: Mapping[str, Any]) -> list[str]:
    """The hosts that the start after this end leaves out."""
    return texts(end.get("exclude"))


def resumed_by_hand(folder: RunFolder) -> None:
    """Record that a user started the run again: automatic restarts are counted from here."""
    _append(folder, {"resumed": datetime.now(UTC).isoformat()})


def recent_ends(folder: RunFolder) -> list[dict[str, Any]]:
    """The ends of starts since a user last started the run."""
    lines = read_lines(folder.attempts)
    last_resume = max((index for index, line in enumerate(lines) if "resumed" in line), default=-1)
    return [line for line in lines[last_resume + 1 :] if _is_end(line)]


def earlier_starts(folder: RunFolder) -> int:
    """How many starts came before the one that runs now, whether or not it has recorded its begin.

    Every start but the first follows an end or a user who started the run again, or both.
    """
    by_hand = [
        "resumed" in line for line in read_lines(folder.attempts) if "resumed" in line or _is_end(line)
    ]
    return sum(this or not following for this, following in pairwise([*by_hand, False]))


def starts(folder: RunFolder) -> list[dict[str, Any]]:
    """The records of all starts. Raises DamagedError."""
    lines = read_lines(folder.attempts)
    return [line for line in lines if text(line.get("began")) and integer(line.get("lost_steps")) is not None]


def ends(folder: RunFolder) -> list[dict[str, Any]]:
    """The records of all ends. Raises DamagedError."""
    return [line for line in read_lines(folder.attempts) if _is_end(line)]


def history(folder: RunFolder, *, environment: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """The entries of `summary.json` about starts: restarts, lost steps, first start, jobs.

    environment: Slurm's variables of a job that may have ended before it could record its start.

    Raises DamagedError.
    """
    records = starts(folder)
    jobs = [*(job_id(record.get("job_id")) for record in records), job_of(environment)]
    return {
        "restarts": max(0, len(records) - 1),
        "lost_steps": sum(record["lost_steps"] for record in records),
        "started": records[0]["began"] if records else None,
        "job_ids": list(dict.fromkeys(job for job in jobs if job)),
    }


def _append(folder: RunFolder, line: Mapping[str, Any]) -> None:
    append_line(folder.attempts, line)


def _is_end(line: Mapping[str, Any]) -> bool:
    return bool(text(line.get("ended")) and text(line.get("how")))


def _content(path: Path) -> bytes:
    """The whole file. The run belongs to this user, so its length is not limited."""
    try:
        with open_regular(path) as file:
            return file.read()
    except FileNotFoundError:
        return b""
