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

from hpc_parallel.launch.job_state import job_of
from hpc_parallel.launch.metrics_file import MetricsReader
from hpc_parallel.launch.run_folder import RunFolder
from hpc_parallel.record.safe_write import append_line, write_text


def begin(
    folder: RunFolder, *, step: int, environment: Mapping[str, str], warnings: Sequence[str] = ()
) -> None:
    """Note a start that goes on after `step`; what the metrics have beyond it will be trained again.

    environment: Slurm's variables; warnings: of damaged checkpoints.
    """
    lines = MetricsReader(folder.metrics).read()
    there = folder.metrics.read_text(encoding="utf-8", errors="replace") if folder.metrics.exists() else None
    kept = [line for line in lines if line["step"] <= step]
    lost = max([line["step"] for line in lines], default=step) - step
    text = "".join(json.dumps(line) + "\n" for line in kept)
    if text != (there or ""):  # lines beyond, or one that was torn
        write_text(folder.metrics, text)
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
    lines = _read(folder.attempts)
    since = max((index for index, line in enumerate(lines) if "resumed" in line), default=-1)
    return [line for line in lines[since + 1 :] if "ended" in line]


def starts(folder: RunFolder) -> list[dict[str, Any]]:
    return [line for line in _read(folder.attempts) if "began" in line]


def ends(folder: RunFolder) -> list[dict[str, Any]]:
    return [line for line in _read(folder.attempts) if "ended" in line]


def history(folder: RunFolder, *, environment: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
    """Of `summary.json`: restarts, lost steps, when the run first began, its jobs.

    environment: Slurm's variables of a job that may have ended before it could note its start.
    """
    known = starts(folder)
    jobs = [*(line["job_id"] for line in known), job_of(environment)]
    return {
        "restarts": max(0, len(known) - 1),
        "lost_steps": sum(line["lost_steps"] for line in known),
        "started": known[0]["began"] if known else None,
        "job_ids": list(dict.fromkeys(job for job in jobs if job)),
    }


def _note(folder: RunFolder, line: Mapping[str, Any]) -> None:
    append_line(folder.attempts, line)


def _read(path: Path) -> list[dict[str, Any]]:
    """Without a line that was torn by a crash."""
    found = []
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                found.append(value)
    return found
