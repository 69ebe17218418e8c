"""The state of runs: Slurm knows if a job is pending, running or ended; the run folder shows how it ended."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from hpc_parallel.record.endings import STARTS_AGAIN
from hpc_parallel.record.owner import elsewhere, process_lives
from hpc_parallel.record.recorded import RecordedRun
from hpc_parallel.slurm.allocation import step_runs
from hpc_parallel.slurm.jobs import FORGOTTEN, SILENT, Inquiry, Job, JobState, job_states, scripts_in_queue

T = TypeVar("T")
RUNNING, WAITING, UNKNOWN, NOT_STARTED = "running", "pending", "unknown", "not started"
BROKEN_OFF, DAMAGED = "broken off", "damaged"
NO_ANSWER, ITS_TURN = "Slurm does not answer", "its turn in a sweep"  # reasons
NO_OUTPUT = "its job has no output: do the hosts see the run folder?"
SUMMED_UP = ("completed", "failed", STARTS_AGAIN, "cancelled", "pruned")  # outcomes of `summary.json`


@dataclass(frozen=True)
class State:
    """The state of a run."""

    name: str  # ours, or the state of its Slurm job in lower case
    reason: str = ""
    ended: bool = False
    job: str | None = None  # None: the run has no Slurm job
    left_s: float | None = field(default=None, compare=False)  # until the time limit of its running job

    def __str__(self) -> str:
        return self.name + (f" ({self.reason})" if self.reason else "")


def states(runs: Sequence[RecordedRun]) -> list[State]:
    """The state of each run, with one call of Slurm's queue for all, and one of its accounting if needed."""
    slurm = Inquiry()
    jobs = [run.job for run in runs]
    reachable = [job for run, job in zip(runs, jobs, strict=True) if job and not elsewhere(run.owner)]
    by_job = job_states(reachable, slurm=slurm)
    run_states = [_state(run, job, by_job) for run, job in zip(runs, jobs, strict=True)]
    return _add_jobs_by_hand(runs, run_states, slurm)


def _state(run: RecordedRun, job: Job | None, by_job: Mapping[Job, JobState]) -> State:
    def build() -> State:
        if job is None:
            return _of_folder(run)
        if reason := elsewhere(run.owner):
            outcome = _outcome(run)
            return State(UNKNOWN, reason, job=job.id) if outcome is None else _ended(run, outcome)
        state = _of_job(run, by_job[job])
        return replace(state, job=job.id, left_s=None if state.ended else by_job[job].left_s)

    return despite_damage(
        build, lambda reason: State(DAMAGED, reason, ended=True, job=job.id if job else None)
    )


def despite_damage(build: Callable[[], T], otherwise: Callable[[str], T]) -> T:
    """Return `build()`, or `otherwise(reason)` after any error: one odd folder must not hide other runs."""
    try:
        return build()
    except Exception as error:
        return otherwise(f"{type(error).__name__}: {error}"[:200])


def _add_jobs_by_hand(runs: Sequence[RecordedRun], run_states: list[State], slurm: Inquiry) -> list[State]:
    """Add the jobs of runs whose batch script a user gave to sbatch.

    Their folders do not name the job before its ranks have connected.
    """
    idle = [
        index for index, (run, state) in enumerate(zip(runs, run_states, strict=True))
        if state.job is None and state.name in (NOT_STARTED, BROKEN_OFF)
        and os.path.exists(run.folder.batch_script)
    ]  # fmt: skip
    queued = (scripts_in_queue(slurm) if idle else None) or ()
    jobs = {script: (job, state) for script, job, state in queued}
    for index in idle:
        script = str(runs[index].folder.batch_script)
        if script in jobs:
            job, job_state = jobs[script]
            run_states[index] = replace(_of_job(runs[index], job_state), job=job)
    return run_states


def _of_job(run: RecordedRun, job: JobState) -> State:
    outcome = _outcome(run)
    packed = run.owner if run.owner is not None and run.owner.is_packed else None
    if packed is not None and packed.over:  # its job may go on, or have ended in another way
        return _ended(run, outcome or BROKEN_OFF)
    if not job.is_known:
        if outcome not in (None, STARTS_AGAIN):
            return _ended(run, str(outcome))
        if job.state == FORGOTTEN:
            return State("gone", "Slurm knows its job no longer", ended=True)
        return State(UNKNOWN, NO_ANSWER if job.state == SILENT else job.reason)
    word = job.state.lower()
    if packed is not None and job.state == "RUNNING":
        return State(WAITING, f"its turn in job {packed.job_id}") if packed.waits else State(RUNNING)
    if not job.ended:
        return State(word, "" if job.reason in ("", "None") else job.reason)
    if outcome is None and word == "completed":  # the batch script succeeded, but the run did not
        return State(BROKEN_OFF, "its job ended without a summary", ended=True)
    is_alone = word == "failed" and outcome is None and not packed
    if is_alone and run.job and not run.folder.job_outputs(run.job.id):
        return State(word, NO_OUTPUT, ended=True)
    if outcome in (None, STARTS_AGAIN):  # Slurm may end a job before it restarts
        return State(word if word != "completed" else str(outcome), ended=True)
    return _ended(run, str(outcome), by="" if word in SUMMED_UP else word)


def _of_folder(run: RecordedRun) -> State:
    """The state of a local run, or of a run whose folder names no process or job."""
    lives = process_lives(run.owner) if run.owner else False
    outcome = _outcome(run)
    began = run.attempts.started is not None
    if lives and waits(run):
        return State(WAITING, ITS_TURN)
    if lives:  # a launcher may restart it after a failure
        return State(outcome or (RUNNING if began else "starting"))
    if outcome is not None:
        return _ended(run, outcome)
    if lives is None and run.owner is not None:
        if run.owner.step is not None and step_runs(run.owner.step):
            return State(RUNNING)
        return State(UNKNOWN, f"its process is on {run.owner.host}")
    if run.folder.owner.name in run.noticed:
        return State(UNKNOWN, f"{run.folder.owner.name} can't be read")
    if began or run.last_metrics is not None:
        return State(BROKEN_OFF, "its process is gone", ended=True)
    return State(NOT_STARTED, ended=True)


def waits(run: RecordedRun) -> bool:
    """Whether the run waits for its turn in a sweep on this machine."""
    return run.owner is not None and run.owner.waits is True


def _outcome(run: RecordedRun) -> str | None:
    outcome = run.totals.outcome
    return outcome if outcome in SUMMED_UP else None


def _ended(run: RecordedRun, outcome: str, *, by: str = "") -> State:
    cause = run.root_cause if outcome == "failed" else None
    return State(outcome, by if cause is None or cause.kind is None else cause.kind, ended=True)
