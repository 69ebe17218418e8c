"""The starts of a run and how each ended: `attempts.jsonl`, one object a start or an end.

A run may start many times: requeued after a time limit or a preemption, restarted after a failure,
resumed by hand, each time from its newest checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hpc_parallel.record.job_state import job_of
from hpc_parallel.record.metrics_file import MetricsReader
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import open_regular, read_lines
from hpc_parallel.record.safe_write import append_line, write_bytes
from hpc_parallel.record.values import job_id, text, whole


def begin(
    folder: RunFolder, *, step: int, environment: Mapping[str, str], warnings: Sequence[str] = ()
) -> None:
    """Note a start that goes on after `step`; what the metrics have beyond it will be trained again.

    environment: Slurm's variables; warnings: of damaged checkpoints.
    """
    lines = MetricsReader(folder.metrics).read()
    kept = [line for line in lines if line["step"] <= step]
    lost = max([line["step"] for line in lines], default=step) - step
    content = "".join(json.dumps(line) + "\n" for line in kept).encode()
    if content != _content(folder.metrics):  # it has lines beyond, or one that was torn
        write_bytes(folder.metrics, content)
    _note(
        folder,
        {
            "began": datetime.now(UTC).isoformat(),
            "job_id": job_of(environment),
            "after_step": step,
            "lost_steps": max(0, lost),
            "warnings": list(warnings),
        },
    )


def end(folder: RunFolder, *, how: str, host: str | None = None) -> None:
    """Note how the newest start ended early: `time_limit`, `preempted`, `cancelled`, or the kind of its
    failure, and where that came from. Of one that completed the summary tells."""
    _note(folder, {"ended": datetime.now(UTC).isoformat(), "how": how, "host": host})


def resumed_by_hand(folder: RunFolder) -> None:
    """Note that a person started the run again: what it may do by itself is counted from here."""
    _note(folder, {"resumed": datetime.now(UTC).isoformat()})


def recent_ends(folder: RunFolder) -> list[dict[str, Any]]:
    """Since a person last started the run."""
    lines = read_lines(folder.attempts)
    since = max((index for index, line in enumerate(lines) if "resumed" in line), default=-1)
    return [line for line in lines[since + 1 :] if _is_end(line)]


def starts(folder: RunFolder) -> list[dict[str, Any]]:
    """Raises DamagedError."""
    lines = read_lines(folder.attempts)
    return [line for line in lines if text(line.get("began")) and whole(line.get("lost_steps")) is not None]


def ends(folder: RunFolder) -> list[dict[str, Any]]:
    """Raises DamagedError."""
    return [line for line in read_lines(folder.attempts) if _is_end(line)]


def history(folder: RunFolder, *, environment: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """Of `summary.json`: restarts, lost steps, when the run first began, its jobs.

    environment: Slurm's variables of a job that may have ended before it could note its start.

    Raises DamagedError.
    """
    known = starts(folder)
    jobs = [*(job_id(line.get("job_id")) for line in known), job_of(environment)]
    return {
        "restarts": max(0, len(known) - 1),
        "lost_steps": sum(line["lost_steps"] for line in known),
        "started": known[0]["began"] if known else None,
        "job_ids": list(dict.fromkeys(job for job in jobs if job)),
    }


def _note(folder: RunFolder, line: Mapping[str, Any]) -> None:
    append_line(folder.attempts, line)


def _is_end(line: Mapping[str, Any]) -> bool:
    return bool(text(line.get("ended")) and text(line.get("how")))


def _content(path: Path) -> bytes:
    """The whole file, which may be of any length in a run that is this user's."""
    try:
        with open_regular(path) as file:
            return file.read()
    except FileNotFoundError:
        return b""
