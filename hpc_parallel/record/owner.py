"""Who runs in a run folder now: one at a time, so that no two trainings write the same checkpoints.

`owner.json` names a process of this user or a job of Slurm; one that is gone owns nothing any more.
"""

from __future__ import annotations

import os
import platform
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpc_parallel.record.job_state import job_state
from hpc_parallel.record.run_folder import RunFolder, alone
from hpc_parallel.record.safe_read import DamagedError, read_json
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.record.trust import UntrustedError, require_private
from hpc_parallel.record.values import job_id as job_id_of
from hpc_parallel.record.values import text, whole

MOST_PID = 2**31 - 1  # that kill(2) takes


class OwnedError(RuntimeError):
    """The run is going on already; the message says where."""


def claim(folder: RunFolder) -> None:
    """Make this process the owner. Raises OwnedError."""
    with alone(folder.path):
        try:
            owner = living_owner(folder)
        except DamagedError as error:
            mend = f"Try rm {folder.owner} if nothing runs there"
            raise OwnedError(f"may be going on: {error}. {mend}") from error
        if owner is not None:
            raise OwnedError(f"is going on already, as {owner}")
        take(folder)


def read_owner(folder: RunFolder) -> dict[str, Any] | None:
    """What `owner.json` says: `job_id`, or `host`, `pid` and `began` of a process, and besides `folder`, by
    which a record that was copied from another run is known, and `waits`.

    Raises DamagedError if it says neither.
    """
    owner = read_json(folder.owner)
    if owner is None:
        return None
    if job := job_id_of(owner.get("job_id")):
        return {"job_id": job}
    pid, host, began = whole(owner.get("pid")), text(owner.get("host")), owner.get("began")
    if pid is None or not 0 < pid <= MOST_PID or host is None or not isinstance(began, str | None):
        raise DamagedError(folder.owner, "it names no process and no job")
    process = {"host": host, "pid": pid, "began": began, "folder": whole(owner.get("folder"))}
    if isinstance(waits := owner.get("waits"), bool):
        process["waits"] = waits
    return process


def this_process() -> dict[str, Any]:
    return _process(os.getpid())


def _process(pid: int) -> dict[str, Any]:
    return {"host": platform.node(), "pid": pid, "began": _began(pid)}


def take(folder: RunFolder) -> None:
    """Make this process the owner in place of the one that started it."""
    _write(folder)


def hand_to_process(folder: RunFolder, pid: int) -> None:
    """Make a child of this process the owner, before it takes the run itself."""
    write_json(folder.owner, {**_process(pid), "folder": folder.path.stat().st_ino})


def queue(folder: RunFolder) -> None:
    """Let the run wait until this process, which has claimed it, begins it (`take_turn`)."""
    _write(folder, waits=True)


def take_turn(folder: RunFolder) -> bool:
    """Whether a run that waited may begin now; then it waits no longer. False if it was withdrawn."""
    with alone(folder.path):
        if not (read_owner(folder) or {}).get("waits"):
            return False
        _write(folder, waits=False)
        return True


def withdraw(folder: RunFolder) -> bool:
    """Keep a run that waits from beginning; False if it has begun."""
    with alone(folder.path):
        if not (read_owner(folder) or {}).get("waits"):
            return False
        folder.owner.unlink()
        return True


def release(folder: RunFolder) -> None:
    """Own it no longer, where this process does."""
    with alone(folder.path):
        if (read_owner(folder) or {}).items() >= this_process().items():
            folder.owner.unlink()


def hold_by_job(folder: RunFolder, job_id: str) -> None:
    """Make the job that this process belongs to the owner. Raises OwnedError where another job runs."""
    with alone(folder.path):
        before = read_owner(folder) or {}
        if before.get("job_id") not in (None, job_id) and (other := living_owner(folder)) is not None:
            raise OwnedError(f"the run is going on already, as {other}")
        hand_to_job(folder, job_id)


def hand_to_job(folder: RunFolder, job_id: str) -> None:
    """From now on the job owns the run, until Slurm says that it has ended."""
    write_json(folder.owner, {"job_id": job_id})


def is_job(folder: RunFolder, job_id: str) -> bool:
    """Whether the run is still that job's: whoever resumed it since has taken it."""
    return (read_owner(folder) or {}).get("job_id") == job_id


def living_owner(folder: RunFolder) -> str | None:
    """Who runs there, in words; None if nobody does. Raises DamagedError."""
    owner = read_owner(folder)
    if owner is None:
        return None
    if job := owner.get("job_id"):
        state = job_state(job)
        return None if state.ended else f"job {job} ({state})"
    lives = process_lives(owner)
    if lives is None:  # not to be seen from here, but what has ended says so
        return None if folder.summary.exists() else f"process {owner['pid']} on {owner['host']}"
    return f"process {owner['pid']}" if lives else None


def refusal(folder: RunFolder) -> str | None:
    """Why nothing may be ended on the word of this run's `owner.json`: it is not this user's own."""
    user = os.geteuid()
    try:
        places = [(place, place.lstat()) for place in (folder.path, folder.owner)]
    except FileNotFoundError:
        return None
    for place, status in places:
        if status.st_uid != user:
            return f"is not yours: {place} belongs to user {status.st_uid}. Only its owner can end it"
    if places[-1][1].st_nlink != 1:
        return f"can't be ended: {folder.owner} is a hard link, so another folder's record may be meant"
    return None


def end_process(folder: RunFolder, owner: Mapping[str, Any]) -> str | None:
    """Send SIGTERM to the process that `read_owner` names; returns why it is not that run's, or None.

    By a descriptor: its number can't become another process's between the checks and the signal.
    """
    process = owner["pid"]
    by_hand = f"If process {process} is this run's: kill {process}"
    try:
        require_private(folder.path)  # else the record may have been another one when it was read
    except UntrustedError as error:
        return f"{error} {by_hand}"
    if owner["folder"] is None:
        return f"was started by an older version, which did not record enough. {by_hand}"
    if owner["folder"] != folder.path.stat().st_ino:
        return f"{folder.owner} was copied from another folder. {by_hand}"
    try:
        with _handle_of(process) as send:
            if os.stat(f"/proc/{process}").st_uid != os.geteuid():
                return f"process {process} is another user's"
            if process_lives(owner):
                send(signal.SIGTERM)
    except (ProcessLookupError, FileNotFoundError):  # it has ended while we asked
        pass
    except PermissionError:
        return f"process {process} is another user's"
    return None


@contextmanager
def _handle_of(process: int) -> Iterator[Callable[[int], None]]:
    """What sends a signal to this very process; before Linux 5.3 to the number that it had."""
    try:
        handle = os.pidfd_open(process)
    except (AttributeError, OSError) as error:
        if isinstance(error, ProcessLookupError):
            raise
        yield lambda number: os.kill(process, number)
        return
    try:
        yield lambda number: signal.pidfd_send_signal(handle, number)
    finally:
        os.close(handle)


def _write(folder: RunFolder, **more: bool) -> None:
    write_json(folder.owner, {**this_process(), "folder": folder.path.stat().st_ino, **more})


def process_lives(owner: Mapping[str, Any]) -> bool | None:
    """Whether the process that `read_owner` names still runs; None if it is another host's."""
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
