"""How runs are ended: a job through Slurm, a local run by its process, a run that waits by its record."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_parallel.record.job_state import Inquiry, scripts_of, states_by_accounting
from hpc_parallel.record.names import label
from hpc_parallel.record.owner import end_process, refusal, withdraw
from hpc_parallel.record.recorded import RecordedRun, read_run
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.supervise.conclude import conclude
from hpc_parallel.supervise.run_state import NO_ANSWER, NOT_STARTED, UNKNOWN, WAITING, State, waits

BEGINNING_S = 10.0  # at most, from a run's turn in a sweep to a process of its own


@dataclass(frozen=True)
class Target:
    """A run that was named, as it stood then."""

    run: RecordedRun
    state: State

    @property
    def job(self) -> str | None:
        return self.state.job

    @property
    def pid(self) -> int:
        """Of the process that starts the ranks (0: nobody's): its SIGTERM has them save and end."""
        return int((self.run.owner or {}).get("pid") or 0)

    @property
    def damage(self) -> str | None:
        """Why it is not known what runs there: `owner.json` can't be read. None if it can."""
        run, name = self.run, self.run.folder.owner.name
        if self.state.ended or run.owner is not None or name not in run.noticed:
            return None
        return (
            f"{run.folder.owner} can't be read ({run.noticed[name]}), so what runs there is "
            "not known. Try squeue --me, or ps, and end it by its number."
        )

    @property
    def refusal(self) -> str | None:
        """Why it can't be ended; None where it can."""
        if self.state.ended:
            return "was never started" if self.state.word == NOT_STARTED else f"has ended: {self.state}"
        if why := refusal(self.run.folder):
            return why
        if self.job is None and self.state.word == UNKNOWN:
            host = (self.run.owner or {}).get("host")
            in_turn = f"python -m hpc_parallel cancel {self.run.run_id}"  # its process is the whole sweep's
            there = in_turn if waits(self.run) else f"kill {self.pid}"
            return f"runs on {host}, and this is {platform.node()}. There: {there}"
        return None

    def __str__(self) -> str:
        where = f"job {self.job}" if self.job else f"process {self.pid}"
        return f"{label(self.run.path)} ({where}, {self.state})"


def end_runs(going: Sequence[Target], *, warn: Callable[[str], None]) -> dict[Path, str]:
    """Ask each run to end. Returns the reason for each run that could not be asked.

    warn: receives one line for a run that ended without a summary because its files are damaged.
    """
    refused = _foreign_jobs([target for target in going if target.job])
    jobs = {target.job: target.run.path for target in going if target.job and target.run.path not in refused}
    if jobs:
        done = _scancel(list(jobs))
        if done.returncode != 0:
            words = done.stderr.strip() or f"scancel ended with {done.returncode}"
            told = {job: [line for line in words.splitlines() if job in line] for job in jobs}
            whom = {job: lines or [words] for job, lines in told.items() if lines or not any(told.values())}
            refused |= {jobs[job]: " ".join(lines) for job, lines in whom.items()}
        _conclude([target for target in going if target.job and target.run.path not in refused], warn=warn)
    # First what waits for its turn: the end of another would let it begin.
    begun = [target.run for target in going if not _withdrawn(target, warn=warn)]
    for run in begun:
        if why := _terminate(run):
            refused[run.path] = why
    return refused


def _foreign_jobs(targets: Sequence[Target]) -> dict[Path, str]:
    """Why a job is not to be ended: Slurm does not answer, or knows it as another user's or run's."""
    refused = {target.run.path: NO_ANSWER for target in targets if target.state.reason == NO_ANSWER}
    asked = [target for target in targets if target.run.path not in refused]
    if not asked:
        return refused
    scripts = scripts_of([str(target.job) for target in asked], Inquiry())
    for target in asked:
        if scripts is None:
            refused[target.run.path] = NO_ANSWER
        elif (script := scripts.get(str(target.job))) is None:
            refused[target.run.path] = f"Slurm has no job {target.job} of yours in its queue"
        elif not is_script_of(target.run.folder, script, job=str(target.job)):
            why = f"job {target.job} runs {script}, which is not this run's"
            refused[target.run.path] = f"{why}. If you mean that job: scancel {target.job}"
    return refused


def is_script_of(folder: RunFolder, script: str, *, job: str) -> bool:
    """Whether a job's batch script lies in the run folder, or is that of an array whose task is this run."""
    place, path = Path(os.path.realpath(os.path.dirname(script))), Path(os.path.realpath(folder.path))
    task = job.partition("_")[2]
    return place.is_relative_to(path) or (task != "" and os.path.realpath(place / task) == str(path))


def _withdrawn(target: Target, *, warn: Callable[[str], None]) -> bool:
    if target.job is not None:
        return True
    try:
        if not waits(target.run) or not withdraw(target.run.folder):
            return False
    except FileNotFoundError:  # its sweep has ended meanwhile, and took it away
        return True
    _sum_up(target.run, environment={}, warn=warn)
    return True


def _terminate(run: RecordedRun) -> str | None:
    """Ask a local run's process to end; returns why it can't be."""
    deadline = time.monotonic() + BEGINNING_S
    while "waits" in (run.owner or {}) and time.monotonic() < deadline:  # its process is the whole sweep's
        time.sleep(0.1)
        run = read_run(run.path)
    owner = run.owner or {}
    if "waits" in owner:
        return "begins just now. Try again"
    return end_process(run.folder, owner) if "pid" in owner else None


def _scancel(jobs: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(["scancel", *jobs], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess("scancel", returncode=1, stdout="", stderr=str(error))


def _conclude(asked: Sequence[Target], *, warn: Callable[[str], None]) -> None:
    """Say in the run folder how a job ended that could not say so itself, since it had never started."""
    waited = [target for target in asked if target.state.word == WAITING]
    known = states_by_accounting([target.job for target in waited if target.job])
    for target in waited:
        unheard = known[str(target.job)].ended and not os.path.lexists(target.run.folder.summary)
        if unheard and not target.run.attempts["started"]:
            _sum_up(target.run, environment={"SLURM_JOB_ID": str(target.job)}, warn=warn)


def _sum_up(run: RecordedRun, *, environment: Mapping[str, str], warn: Callable[[str], None]) -> None:
    try:
        conclude(run.folder, returncode=1, cancelled=True, environment=environment)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # its files are damaged
        warn(f"{label(run.path)} has ended, and no summary.json says so: {error!r}")
