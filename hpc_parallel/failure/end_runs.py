"""Ends runs: a job through Slurm, a local run through its process, a waiting run through its record."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_parallel.failure.conclude_run import conclude, conclude_waiting
from hpc_parallel.failure.packed_job import is_left_by_all
from hpc_parallel.failure.run_state import NO_ANSWER, NOT_STARTED, UNKNOWN, WAITING, State, waits
from hpc_parallel.record.endings import STARTS_AGAIN
from hpc_parallel.record.names import label
from hpc_parallel.record.owner import elsewhere, end_process, refusal, withdraw
from hpc_parallel.record.recorded import RecordedRun, read_run
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.slurm.client import Inquiry
from hpc_parallel.slurm.jobs import Job, JobState, job_states, scripts_of
from hpc_parallel.slurm.submit import scancel

CANCEL_S = 5.0  # the longest time from scancel to a change of the job's state
STARTING_S = 10.0  # the longest time from a run's turn in a sweep to the start of its process


@dataclass(frozen=True)
class Target:
    """A run to end, and its state at the time of the command."""

    run: RecordedRun
    state: State

    @property
    def job(self) -> str | None:
        return self.state.job

    @property
    def own_job(self) -> str | None:
        """The job that ends with the run; None if the run has none, or shares it with other runs."""
        is_packed = self.run.owner is not None and self.run.owner.is_packed
        return None if is_packed else self.job

    @property
    def pid(self) -> int:
        """The process that starts the ranks (0: none). On SIGTERM it lets the ranks save and end."""
        return (self.run.owner and self.run.owner.pid) or 0

    @property
    def damage(self) -> str | None:
        """A message if `owner.json` can't be read, so that the owner is unknown; None if it can."""
        run, name = self.run, self.run.folder.owner.name
        if self.state.ended or run.owner is not None or name not in run.noticed:
            return None
        return (
            f"{run.folder.owner} can't be read ({run.noticed[name]}), so what runs there is "
            "not known. Try squeue --me, or ps, and end it by its number."
        )

    @property
    def refusal(self) -> str | None:
        """Why the run can't be ended; None if it can."""
        if self.state.ended:
            return "was never started" if self.state.name == NOT_STARTED else f"has ended: {self.state}"
        if reason := refusal(self.run.folder):
            return reason
        if reason := elsewhere(self.run.owner):
            return f"can't be ended from here: {reason}"
        if self.job is None and self.state.name == UNKNOWN:
            host = self.run.owner and self.run.owner.host
            command = f"kill {self.pid}"
            if waits(self.run):  # the owner's process runs the complete sweep
                command = f"python -m hpc_parallel cancel {self.run.run_id}"
            return f"runs on {host}, and this is {platform.node()}. There: {command}"
        return None

    def __str__(self) -> str:
        where = f"job {self.job}" if self.job else f"process {self.pid}"
        return f"{label(self.run.path)} ({where}, {self.state})"


def end_runs(targets: Sequence[Target], *, warn: Callable[[str], None]) -> dict[Path, str]:
    """Ask each run to end; returns the reason for each run that could not be asked.

    warn: receives one line for a run that ended without a summary because its files are damaged.
    """
    refused = _foreign_jobs([target for target in targets if target.own_job])
    jobs = [target for target in targets if target.own_job and target.run.path not in refused]
    if jobs:
        refused |= _cancel_jobs({str(target.job): target.run.path for target in jobs})
        cancelled = [target for target in jobs if target.run.path not in refused]
        by_id = {job.id: state for job, state in _states_after_scancel(cancelled).items()}
        for target in cancelled:
            if _is_active(state := by_id[str(target.job)]):
                refused[target.run.path] = f"scancel has no effect: Slurm still lists its job as {state}"
        _conclude(cancelled, by_id, warn=warn)
    # Waiting runs first: the end of another run would let them start.
    started = [target.run for target in targets if not _withdrawn(target, warn=warn)]
    _cancel_empty_jobs(targets)
    for run in started:
        if reason := _terminate(run):
            refused[run.path] = reason
    return refused


def _cancel_jobs(jobs: Mapping[str, Path]) -> dict[Path, str]:
    """Run scancel for jobs (job id -> run folder); returns Slurm's message for each run that it refused."""
    process = scancel(jobs)
    if process.returncode == 0:
        return {}
    message = process.stderr.strip() or f"scancel ended with {process.returncode}"
    lines = {job: [line for line in message.splitlines() if re.search(rf"\b{job}\b", line)] for job in jobs}
    if not any(lines.values()):  # the message names no job, so it is about all of them
        return dict.fromkeys(jobs.values(), message)
    return {jobs[job]: " ".join(job_lines) for job, job_lines in lines.items() if job_lines}


def _states_after_scancel(targets: Sequence[Target]) -> dict[Job, JobState]:
    """The states of jobs that the queue listed before, so a job that it no longer lists has ended."""
    jobs = _jobs(targets)
    deadline = time.monotonic() + CANCEL_S
    while any(map(_is_active, (states := job_states(jobs)).values())) and time.monotonic() < deadline:
        time.sleep(0.2)
    return states


def _jobs(targets: Sequence[Target]) -> list[Job]:
    return [Job(target.job) for target in targets if target.job]


def _is_active(state: JobState) -> bool:
    return state.is_known and not state.ended and state.state not in ("COMPLETING", "STAGE_OUT")


def _foreign_jobs(targets: Sequence[Target]) -> dict[Path, str]:
    """Why a job can't be ended: Slurm does not answer, or the job belongs to another user or run."""
    refused = {target.run.path: NO_ANSWER for target in targets if target.state.reason == NO_ANSWER}
    answered = [target for target in targets if target.run.path not in refused]
    if not answered:
        return refused
    scripts = scripts_of(_jobs(answered), Inquiry())
    for target in answered:
        if scripts is None:
            refused[target.run.path] = NO_ANSWER
        elif (script := scripts.get(str(target.job))) is None:
            refused[target.run.path] = f"Slurm has no job {target.job} of yours in its queue"
        elif not is_script_of(target.run.folder, script, job=str(target.job)):
            reason = f"job {target.job} runs {script}, which is not this run's"
            refused[target.run.path] = f"{reason}. If you mean that job: scancel {target.job}"
    return refused


def is_script_of(folder: RunFolder, script: str, *, job: str) -> bool:
    """Whether a batch script is in the run folder, or is the script of an array with this run as a task."""
    script_dir, path = Path(os.path.realpath(os.path.dirname(script))), Path(os.path.realpath(folder.path))
    task = job.partition("_")[2]
    return script_dir.is_relative_to(path) or (
        task != "" and os.path.realpath(script_dir / task) == str(path)
    )


def _cancel_empty_jobs(targets: Sequence[Target]) -> None:
    """Cancel packed jobs that have not started and have no run left; a job that has started ends itself."""
    waiting = {target.job for target in targets if target.own_job is None and target.state.name == WAITING}
    jobs = [Job(job) for job in waiting if job is not None]
    scripts = (scripts_of(jobs, Inquiry()) if jobs else None) or {}
    for job, script in scripts.items():
        if job in waiting and is_left_by_all(Path(script).parent):
            scancel([job])


def _withdrawn(target: Target, *, warn: Callable[[str], None]) -> bool:
    """Whether no process remains to end: the target is a job, or a waiting run that is now withdrawn."""
    if target.own_job is not None:
        return True
    try:
        if not waits(target.run) or not withdraw(target.run.folder):
            return False
    except FileNotFoundError:  # its sweep has ended meanwhile and removed the run
        return True
    _write_summary(target.run, environment={}, warn=warn)
    return True


def _terminate(run: RecordedRun) -> str | None:
    """Ask a local run's process to end; returns the reason if that is not possible."""
    deadline = time.monotonic() + STARTING_S
    while _has_turn(run) and time.monotonic() < deadline:  # the owner's process runs the sweep
        time.sleep(0.1)
        run = read_run(run.path)
    if _has_turn(run):
        return "is just starting. Try again"
    if (owner := run.owner) is None or owner.over or (owner.pid is None and not owner.is_packed):
        return None
    return end_process(run.folder, owner)


def _has_turn(run: RecordedRun) -> bool:
    """Whether the owner is the process or job of a sweep, before the run has a process or step of its own."""
    owner = run.owner
    return owner is not None and owner.waits is not None and owner.step is None and not owner.over


def _conclude(
    cancelled: Sequence[Target], by_id: Mapping[str, JobState], *, warn: Callable[[str], None]
) -> None:
    """Record that a job was cancelled before a start, because such a job can't record this itself."""
    for target in cancelled:
        ended = target.state.name == WAITING and by_id[str(target.job)].ended
        waits_again = target.run.totals.outcome == STARTS_AGAIN
        is_new = not os.path.lexists(target.run.folder.summary) and not target.run.attempts.started
        if ended and (is_new or waits_again):
            _write_summary(target.run, environment={"SLURM_JOB_ID": str(target.job)}, warn=warn)


def _write_summary(run: RecordedRun, *, environment: Mapping[str, str], warn: Callable[[str], None]) -> None:
    try:
        if run.totals.outcome == STARTS_AGAIN:
            conclude_waiting(run.folder, environment=environment)
        else:
            conclude(run.folder, returncode=1, cancelled=True, environment=environment)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # its files are damaged
        warn(f"{label(run.path)} has ended, but its summary.json could not be written: {error!r}")
