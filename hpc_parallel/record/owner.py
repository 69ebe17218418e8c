"""The owner of a run folder: one process or job at a time, so that no two of them write the same checkpoints.

`owner.json` names a process of this user or a Slurm job. Once that process or job has ended, it is no longer
the owner.
"""

from __future__ import annotations

import os
import platform
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from hpc_parallel.problems import shell_word
from hpc_parallel.record.endings import has_final_summary
from hpc_parallel.record.run_folder import RunFolder, locked
from hpc_parallel.record.safe_read import DamagedError, read_json
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.record.trust import UntrustedError, require_private
from hpc_parallel.record.typed import build
from hpc_parallel.record.values import job_id as job_id_of
from hpc_parallel.record.values import step_id
from hpc_parallel.slurm.client import CLUSTERS
from hpc_parallel.slurm.jobs import NOT_YET, SILENT, UNKNOWN, Job, job_state
from hpc_parallel.slurm.submit import scancel

MAX_PID = 2**31 - 1  # the largest that kill(2) accepts


class OwnedError(RuntimeError):
    """The run is already active; the message says where."""


def claim(folder: RunFolder) -> None:
    """Make this process the owner. Raises OwnedError."""
    with locked(folder.path):
        try:
            owner = living_owner(folder)
        except DamagedError as error:
            suggestion = f"Try rm {shell_word(folder.owner)} if nothing runs there"
            raise OwnedError(f"may be going on: {error}. {suggestion}") from error
        if owner is not None:
            raise OwnedError(f"is going on already, as {owner}")
        take(folder)


@dataclass(frozen=True)
class Owner:
    """The content of `owner.json`: a job, or a process. Keys whose value is None are not written."""

    job_id: Annotated[str, job_id_of] | None = None
    clusters: str | None = None  # of the job, if sbatch or SLURM_CLUSTERS named its cluster
    submitted_s: float | None = None  # of the job, since 1970
    host: str | None = None
    pid: int | None = None
    began: str | None = None  # None: the process has ended
    folder: int | None = None  # inode of the run folder: a copied record has another one
    step: Annotated[str, step_id] | None = None  # `123.4`: of the ranks, in an allocation
    waits: bool | None = None  # whether the run waits for its turn in a sweep; None: it never did
    over: bool | None = None  # whether the run has ended in its packed job, which may go on without it

    @classmethod
    def read(cls, folder: RunFolder) -> Owner | None:
        """None if there is no file. Raises DamagedError if it names neither a job nor a process."""
        values = read_json(folder.owner)
        owner = build(cls, values)
        if owner is None or values is None:
            return None
        if owner.job_id is not None:
            return replace(owner, host=None, pid=None, began=None, folder=None)
        is_process = owner.host is not None and owner.pid is not None and 0 < owner.pid <= MAX_PID
        if not is_process or (owner.began is None and values.get("began") is not None):
            raise DamagedError(folder.owner, "it names no process and no job")
        return replace(owner, clusters=None, submitted_s=None, over=None)

    @property
    def is_packed(self) -> bool:
        """Whether the job has other runs too, and `waits` says whether this one has had its turn."""
        return self.job_id is not None and self.waits is not None

    @property
    def job(self) -> Job | None:
        return None if self.job_id is None else Job(self.job_id, self.clusters, self.submitted_s)

    def write(self, folder: RunFolder) -> None:
        values = {key: value for key, value in vars(self).items() if value is not None}
        write_json(folder.owner, values)

    @property
    def process(self) -> str:
        """Another text for each process; empty for a job."""
        return "" if self.pid is None else f"{self.host} {self.pid} {self.began}"


def this_process() -> Owner:
    """The `host`, `pid` and `began` of this process."""
    return _process(os.getpid())


def _process(pid: int) -> Owner:
    return Owner(host=platform.node(), pid=pid, began=_began(pid))


def take(folder: RunFolder, *, waits: bool | None = None) -> None:
    """Make this process the owner in place of the one that started it."""
    replace(this_process(), folder=folder.path.stat().st_ino, waits=waits).write(folder)


def hand_to_process(folder: RunFolder, pid: int) -> None:
    """Make a child of this process the owner, before the child takes the run itself."""
    replace(_process(pid), folder=folder.path.stat().st_ino).write(folder)


def queue(folder: RunFolder) -> None:
    """Make the run wait until this process, which has claimed it, starts it (`take_turn`)."""
    take(folder, waits=True)


def waits(folder: RunFolder) -> bool:
    """Whether the run waits for its turn."""
    return (Owner.read(folder) or Owner()).waits is True


def take_turn(folder: RunFolder) -> bool:
    """End the wait of a run, which may then start. Returns False if it was withdrawn."""
    with locked(folder.path):
        if not (owner := Owner.read(folder)) or not owner.waits:
            return False
        if owner.is_packed:
            replace(owner, waits=False).write(folder)
        else:
            take(folder, waits=False)
        return True


def withdraw(folder: RunFolder) -> bool:
    """Prevent the start of a run that waits. Returns False if it has started."""
    with locked(folder.path):
        if not (owner := Owner.read(folder)) or not owner.waits:
            return False
        if owner.is_packed:
            replace(owner, waits=False, over=True).write(folder)
        else:
            folder.owner.unlink()
        return True


def queue_in_job(folder: RunFolder, job: Job) -> None:
    """Make the run wait for its turn in a packed job, which may have taken it already."""
    with locked(folder.path):
        before = Owner.read(folder) or Owner()
        if not (before.job_id == job.id and before.is_packed):
            _of_job(job, waits=True).write(folder)


def wait_again(folder: RunFolder) -> None:
    """Make a run that had its turn in a packed job wait for another one."""
    with locked(folder.path):
        if (owner := Owner.read(folder)) is not None and owner.is_packed:
            replace(owner, waits=True, step=None).write(folder)


def end_turn(folder: RunFolder) -> None:
    """Record that the run has ended in its packed job. A later start has another owner."""
    with locked(folder.path):
        if (owner := Owner.read(folder)) is not None and owner.is_packed:
            replace(owner, over=True).write(folder)


def release(folder: RunFolder) -> None:
    """Give up ownership if this process is the owner."""
    with locked(folder.path):
        if (owner := Owner.read(folder)) is not None and owner.process == this_process().process:
            folder.owner.unlink()


def hold_by_job(folder: RunFolder, job_id: str, *, step: str | None = None) -> None:
    """Make the job of this process the owner. Raises OwnedError if another active job is the owner.

    A process that started the run inside its own allocation stays the owner. step: the number of this step,
    if the run is all that the step does.
    """
    with locked(folder.path):
        before = Owner.read(folder) or Owner()
        if before.pid is not None and living_owner(folder) is not None:
            if step is not None:
                replace(before, step=f"{job_id}.{step}").write(folder)
            return
        if before.job_id == job_id:  # the submission knew the clusters, the job may not
            if before.is_packed and step is not None:
                replace(before, step=f"{job_id}.{step}").write(folder)
            return
        if before.job_id is not None and (other := living_owner(folder)) is not None:
            raise OwnedError(f"the run is going on already, as {other}")
        _of_job(Job(job_id, submitted_s=time.time())).write(folder)


def other_job(folder: RunFolder, job_id: str) -> str | None:
    """Another job that owns the run and is active, as Slurm says, or None. Raises DamagedError."""
    owner = Owner.read(folder) or Owner()
    if owner.job is None or owner.job_id == job_id or owner.over or elsewhere(owner):
        return None
    state = job_state(owner.job)
    return None if state.ended or state.state in (UNKNOWN, SILENT) else f"job {owner.job.id} ({state})"


def hand_to_job(folder: RunFolder, job: Job) -> None:
    """Make the job the owner of the run until Slurm reports its end."""
    with locked(folder.path):  # the job may write that it has started
        _of_job(job).write(folder)


def _of_job(job: Job, *, waits: bool | None = None) -> Owner:
    clusters = job.cluster or os.environ.get(CLUSTERS) or None
    return Owner(job_id=job.id, clusters=clusters, submitted_s=job.submitted_s, waits=waits)


def elsewhere(owner: Owner | None) -> str | None:
    """Why this shell can't query the job of `owner`: it is on another cluster. None if the shell can."""
    here = os.environ.get(CLUSTERS) or None
    if owner is None or owner.job_id is None or (clusters := owner.clusters) == here:
        return None
    if here is not None and clusters in here.split(","):
        return None
    if clusters is None:
        return f"its job is on the usual cluster, and this shell has {CLUSTERS}={here}. Try unset {CLUSTERS}"
    return f"its job is on another cluster. Try export {CLUSTERS}={shell_word(clusters)}"


def is_job(folder: RunFolder, job_id: str) -> bool:
    """Whether the job still owns the run: a later resume changes the owner."""
    return (Owner.read(folder) or Owner()).job_id == job_id


def living_owner(folder: RunFolder) -> str | None:
    """The active owner as text (`job 7 (running)`, `process 12`), or None. Raises DamagedError."""
    owner = Owner.read(folder)
    if owner is None:
        return None
    if job := owner.job:
        if owner.over:
            return None
        if reason := elsewhere(owner):
            return f"job {job.id} ({reason})"
        state = job_state(job)
        if state.ended or (state.state == UNKNOWN and has_final_summary(folder)):
            return None
        advice = f". If it has ended: rm {shell_word(folder.owner)}"
        return f"job {job.id} ({state})" + advice * (state.state == UNKNOWN and state.reason != NOT_YET)
    lives = process_lives(owner)
    if lives is None:  # on another host, where only the summary shows that it has ended
        return None if folder.summary.exists() else f"process {owner.pid} on {owner.host}"
    return f"process {owner.pid}" if lives else None


def refusal(folder: RunFolder) -> str | None:
    """Why the owner that `owner.json` names must not be ended: the file is not this user's own."""
    user = os.geteuid()
    try:
        statuses = {path: path.lstat() for path in (folder.path, folder.owner)}
    except FileNotFoundError:
        return None
    for path, status in statuses.items():
        if status.st_uid != user:
            return f"is not yours: {path} belongs to user {status.st_uid}. Only its owner can end it"
    if statuses[folder.owner].st_nlink != 1:
        return f"can't be ended: {folder.owner} is a hard link, so it may be another folder's record"
    return None


def end_process(folder: RunFolder, owner: Owner) -> str | None:
    """Send SIGTERM to the process that owns the run, or to its step in an allocation or a packed job.

    The signal goes to a process file descriptor (pidfd), so the pid can't be reused between the checks and
    the signal.

    Returns why the process may not belong to the run, or None.
    """
    process, by_hand = owner.pid or 0, f"If process {owner.pid} is this run's: kill {owner.pid}"
    if owner.is_packed:
        by_hand = f"If step {owner.step} is this run's: scancel --ctld --signal=TERM {owner.step}"
    try:
        require_private(folder.path)  # otherwise another user may have replaced the record
    except UntrustedError as error:
        return f"{error} {by_hand}"
    if owner.is_packed and owner.step is not None:
        return _end_step(owner.step, cluster=owner.clusters)
    if owner.folder is None:
        return f"was started by an older version, which did not record enough. {by_hand}"
    if owner.folder != folder.path.stat().st_ino:
        return f"{folder.owner} was copied from another folder. {by_hand}"
    if owner.step is not None and process_lives(owner) is None:  # on another host; never the whole job
        return _end_step(owner.step)
    try:
        with _handle_of(process) as send:
            if os.stat(f"/proc/{process}").st_uid != os.geteuid():
                return f"process {process} is another user's"
            if process_lives(owner):
                send(signal.SIGTERM)
    except (ProcessLookupError, FileNotFoundError):  # it ended during the checks
        pass
    except PermissionError:
        return f"process {process} is another user's"
    return None


def _end_step(step: str, *, cluster: str | None = None) -> str | None:
    """Send SIGTERM to a step; returns Slurm's refusal, or None.

    By the controller: scancel itself also asks hosts of the job without this step, and then reports an error.
    """
    return scancel(["--ctld", "--signal=TERM", step], cluster=cluster).stderr.strip() or None


@contextmanager
def _handle_of(process: int) -> Iterator[Callable[[int], None]]:
    """A function that sends a signal to this process by its descriptor (before Linux 5.3: by its pid)."""
    try:
        handle = os.pidfd_open(process)
    except (AttributeError, OSError) as error:
        if isinstance(error, ProcessLookupError):
            raise
        yield lambda signal_number: os.kill(process, signal_number)
        return
    try:
        yield lambda signal_number: signal.pidfd_send_signal(handle, signal_number)
    finally:
        os.close(handle)


def process_lives(owner: Owner) -> bool | None:
    """Whether the process still runs; None if it is on another host."""
    if owner.host != platform.node():
        return None
    return owner.pid is not None and owner.began is not None and _began(owner.pid) == owner.began


def _began(process: int) -> str | None:
    """When a process started: the boot id and the ticks since boot, because a pid is reused (proc(5))."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return None if fields[0] in "ZX" else f"{boot} {fields[19]}"
