"""How runs stand: Slurm knows whether a job waits, runs or has ended; the run folder knows how it ended."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from hpc_parallel.record.job_state import (
    FORGOTTEN,
    SILENT,
    Inquiry,
    JobState,
    jobs_by_script,
    states_by_accounting,
)
from hpc_parallel.record.owner import process_lives
from hpc_parallel.record.recorded import RecordedRun
from hpc_parallel.record.values import text

T = TypeVar("T")
RUNNING, WAITING, UNKNOWN, NOT_STARTED = "running", "pending", "unknown", "not started"
BROKEN_OFF, DAMAGED = "broken off", "damaged"
NO_ANSWER, ITS_TURN = "Slurm does not answer", "its turn in a sweep"  # reasons
SUMMED_UP = ("completed", "failed", "preempted", "cancelled")  # outcomes of `summary.json`


@dataclass(frozen=True)
class State:
    """`word`: of the run or, in small letters, Slurm's own of its `job` (None: the run has none)."""

    word: str
    reason: str = ""
    ended: bool = False
    job: str | None = None

    def __str__(self) -> str:
        return self.word + (f" ({self.reason})" if self.reason else "")


def states(runs: Sequence[RecordedRun]) -> list[State]:
    """Of each run, by one call of Slurm's accounting for all, and one of its queue where that is needed."""
    slurm = Inquiry()
    jobs = [_job_of(run) for run in runs]
    known = states_by_accounting(list(dict.fromkeys(job for job in jobs if job is not None)), slurm=slurm)
    found = [_state(run, job, known) for run, job in zip(runs, jobs, strict=True)]
    return _with_those_by_hand(runs, found, slurm)


def _state(run: RecordedRun, job: str | None, known: Mapping[str, JobState]) -> State:
    def build() -> State:
        return _of_folder(run) if job is None else replace(_of_job(run, known[job]), job=job)

    return despite_damage(build, lambda why: State(DAMAGED, why, ended=True, job=job))


def despite_damage(build: Callable[[], T], otherwise: Callable[[str], T]) -> T:
    """The last defence of a list of runs: a folder that surprises us must not hide the others."""
    try:
        return build()
    except Exception as error:
        return otherwise(f"{type(error).__name__}: {error}"[:200])


def _with_those_by_hand(runs: Sequence[RecordedRun], found: list[State], slurm: Inquiry) -> list[State]:
    """Also of runs whose batch script was given to sbatch by hand: their folders don't name the job before
    its ranks have met."""
    idle = [
        at for at, (run, state) in enumerate(zip(runs, found, strict=True))
        if state.job is None and state.word in (NOT_STARTED, BROKEN_OFF)
        and os.path.exists(run.folder.batch_script)
    ]  # fmt: skip
    by_script = jobs_by_script(slurm) if idle else {}
    for at in idle:
        if (known := by_script.get(str(runs[at].folder.batch_script))) is not None:
            job, state = known
            found[at] = replace(_of_job(runs[at], state), job=job)
    return found


def _job_of(run: RecordedRun) -> str | None:
    """The job of the newest start; None where that was no job of Slurm's."""
    if run.owner is not None and "pid" in run.owner:
        return None
    return run.job_ids[-1] if run.job_ids else None


def _of_job(run: RecordedRun, job: JobState) -> State:
    outcome = _outcome(run)
    if job.state in (SILENT, FORGOTTEN):
        if outcome not in (None, "preempted"):
            return _ended(run, str(outcome))
        if job.state == SILENT:
            return State(UNKNOWN, NO_ANSWER)
        return State("gone", "Slurm knows its job no longer", ended=True)
    word = job.state.lower()
    if not job.ended:
        return State(word, "" if job.reason in ("", "None") else job.reason)
    if outcome in (None, "preempted"):  # a job that starts again may be ended before it does
        return State(word, ended=True)
    return _ended(run, str(outcome), by="" if word in SUMMED_UP else word)


def _of_folder(run: RecordedRun) -> State:
    """Of a local run, or one whose folder names nobody."""
    lives = process_lives(run.owner) if run.owner else False
    outcome = _outcome(run)
    began = run.attempts["started"] is not None
    if lives and waits(run):
        return State(WAITING, ITS_TURN)
    if lives:  # a launcher may start it again after it has failed
        return State(outcome or (RUNNING if began else "starting"))
    if outcome is not None:
        return _ended(run, outcome)
    if lives is None:
        return State(UNKNOWN, f"its process is on {(run.owner or {})['host']}")
    if run.folder.owner.name in run.noticed:
        return State(UNKNOWN, f"{run.folder.owner.name} can't be read")
    if began or run.last_metrics is not None:
        return State(BROKEN_OFF, "its process is gone", ended=True)
    return State(NOT_STARTED, ended=True)


def waits(run: RecordedRun) -> bool:
    """Whether it waits for its turn in a sweep on this machine."""
    return (run.owner or {}).get("waits") is True


def _outcome(run: RecordedRun) -> str | None:
    outcome = text((run.summary or {}).get("outcome"))
    return outcome if outcome in SUMMED_UP else None


def _ended(run: RecordedRun, outcome: str, *, by: str = "") -> State:
    kind = text((run.failure or {}).get("kind")) if outcome == "failed" else None
    return State(outcome, by if kind is None else kind, ended=True)
