"""How runs stand: Slurm knows whether a job waits, runs or has ended; the run folder knows how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpc_parallel.launch.job_state import (
    FORGOTTEN,
    SILENT,
    Inquiry,
    JobState,
    jobs_by_script,
    states_by_accounting,
)
from hpc_parallel.launch.owner import process_lives
from hpc_parallel.launch.recorded import RecordedRun

RUNNING, WAITING, UNKNOWN, NOT_STARTED = "running", "pending", "unknown", "not started"
BROKEN_OFF = "broken off"
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
    found = [
        _of_folder(run) if job is None else replace(_of_job(run, known[job]), job=job)
        for run, job in zip(runs, jobs, strict=True)
    ]
    return _with_those_by_hand(runs, found, slurm)


def _with_those_by_hand(runs: Sequence[RecordedRun], found: list[State], slurm: Inquiry) -> list[State]:
    """Also of runs whose batch script was given to sbatch by hand: their folders don't name the job before
    its ranks have met."""
    idle = [
        at for at, (run, state) in enumerate(zip(runs, found, strict=True))
        if state.job is None and state.word in (NOT_STARTED, BROKEN_OFF) and run.folder.batch_script.exists()
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
    lives = _lives(run)
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
    if began or run.last_metrics is not None:
        return State(BROKEN_OFF, "its process is gone", ended=True)
    return State(NOT_STARTED, ended=True)


def waits(run: RecordedRun) -> bool:
    """Whether it waits for its turn in a sweep on this machine."""
    return (run.owner or {}).get("waits") is True


def _lives(run: RecordedRun) -> bool | None:
    """None of a process on another host."""
    owner = run.owner or {}
    return process_lives(owner) if owner.keys() >= {"host", "pid", "began"} else False


def _outcome(run: RecordedRun) -> str | None:
    said = (run.summary or {}).get("outcome")
    return said if said in SUMMED_UP else None


def _ended(run: RecordedRun, outcome: str, *, by: str = "") -> State:
    kind = (run.failure or {}).get("kind") if outcome == "failed" else None
    return State(outcome, kind if isinstance(kind, str) else by, ended=True)
