"""Who runs in a run folder now: one at a time, so that no two trainings write the same checkpoints.

`owner.json` names a process of this user or a job of Slurm; one that is gone owns nothing any more.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_parallel.launch.job_state import job_state
from hpc_parallel.launch.run_folder import RunFolder, alone
from hpc_parallel.record.safe_read import read_json
from hpc_parallel.record.safe_write import write_json


class OwnedError(RuntimeError):
    """The run is going on already; the message says where."""


def claim(folder: RunFolder) -> None:
    """Make this process the owner. Raises OwnedError."""
    with alone(folder.path):
        if (owner := living_owner(folder)) is not None:
            raise OwnedError(f"is going on already, as {owner}")
        write_json(folder.owner, this_process())


def this_process() -> dict[str, Any]:
    return {"host": platform.node(), "pid": os.getpid(), "began": _began(os.getpid())}


def take(folder: RunFolder) -> None:
    """Make this process the owner in place of the one that started it."""
    write_json(folder.owner, this_process())


def queue(folder: RunFolder) -> None:
    """Let the run wait until this process, which has claimed it, begins it (`take_turn`)."""
    write_json(folder.owner, {**this_process(), "waits": True})


def take_turn(folder: RunFolder) -> bool:
    """Whether a run that waited may begin now; then it waits no longer. Not where it was withdrawn."""
    with alone(folder.path):
        if not (read_json(folder.owner) or {}).get("waits"):
            return False
        write_json(folder.owner, {**this_process(), "waits": False})
        return True


def withdraw(folder: RunFolder) -> bool:
    """Keep a run that waits from beginning; False where it has begun."""
    with alone(folder.path):
        if not (read_json(folder.owner) or {}).get("waits"):
            return False
        folder.owner.unlink()
        return True


def release(folder: RunFolder) -> None:
    """Own it no longer, where this process does."""
    with alone(folder.path):
        if (read_json(folder.owner) or {}).items() >= this_process().items():
            folder.owner.unlink()


def hold_by_job(folder: RunFolder, job_id: str) -> None:
    """Make the job that this process belongs to the owner. Raises OwnedError where another job runs."""
    with alone(folder.path):
        before = read_json(folder.owner) or {}
        if before.get("job_id") not in (None, job_id) and (other := living_owner(folder)) is not None:
            raise OwnedError(f"the run is going on already, as {other}")
        hand_to_job(folder, job_id)


def hand_to_job(folder: RunFolder, job_id: str) -> None:
    """From now on the job owns the run, until Slurm says that it has ended."""
    write_json(folder.owner, {"job_id": job_id})


def is_job(folder: RunFolder, job_id: str) -> bool:
    """Whether the run is still that job's: whoever resumed it since has taken it."""
    return (read_json(folder.owner) or {}).get("job_id") == job_id


def living_owner(folder: RunFolder) -> str | None:
    """Who runs there, in words; None where nobody does."""
    owner = read_json(folder.owner)
    if owner is None:
        return None
    if job := owner.get("job_id"):
        state = job_state(job)
        return None if state.ended else f"job {job} ({state})"
    lives = process_lives(owner)
    if lives is None:  # not to be seen from here, but what has ended says so
        return None if folder.summary.exists() else f"process {owner['pid']} on {owner['host']}"
    return f"process {owner['pid']}" if lives else None


def process_lives(owner: Mapping[str, Any]) -> bool | None:
    """Whether the process that `owner.json` names still runs; None where it is another host's."""
    if owner["host"] != platform.node():
        return None
    return bool(_began(owner["pid"]) == owner["began"] is not None)


def _began(process: int) -> Any:
    """When a process began, in ticks since the machine did: its number may be another's later (proc(5))."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return None if fields[0] in "ZX" else f"{boot} {fields[19]}"
