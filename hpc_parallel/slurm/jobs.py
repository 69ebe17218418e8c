"""The state of Slurm jobs, from scontrol, squeue or sacct, whichever answers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hpc_parallel.slurm.client import UNANSWERED, Inquiry
from hpc_parallel.slurm.short_forms import expand_numbers, seconds_of

ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
    "REVOKED", "TIMEOUT",
}  # fmt: skip
# These two are not states of Slurm.
SILENT = "NO ANSWER"  # the controller does not answer; the job may still run
FORGOTTEN = "FORGOTTEN"  # Slurm no longer has a record of the job

_SACCT_COLUMNS = "JobID,JobIDRaw,State,Elapsed,Timelimit"
_SHOW = ("scontrol", "--oneliner", "show", "job")
_PERMANENT = {
    "BadConstraints", "InvalidAccount", "InvalidQOS", "PartitionConfig", "PartitionNodeLimit",
    "PartitionTimeLimit",
}  # fmt: skip


@dataclass(frozen=True)
class JobState:
    """A job state of Slurm and its reason (why the job waits, or how it ended).

    left_s: the time until the time limit of a running job; None if the job has no limit, or it is unknown.
    """

    state: str
    reason: str = ""
    left_s: float | None = field(default=None, compare=False)

    @property
    def ended(self) -> bool:
        return self.state in ENDED or self.state == FORGOTTEN

    def __str__(self) -> str:
        return self.state.lower() + (f" ({self.reason})" if self.reason not in ("", "None") else "")


def job_of(environment: Mapping[str, str]) -> str | None:
    """The job id in Slurm's variables, as sacct, scancel and scontrol accept it: `123` or `123_4`.

    An array task is named by its array and number, as the submission names it.
    """
    if "SLURM_ARRAY_JOB_ID" in environment and "SLURM_ARRAY_TASK_ID" in environment:
        return f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment.get("SLURM_JOB_ID")


def job_states(job_ids: Sequence[str]) -> dict[str, JobState]:
    """The states of those jobs and array tasks that squeue still lists."""
    return _queued(job_ids, Inquiry())[0]


def job_state(job_id: str) -> JobState:
    """The state of a job from the controller, or from accounting if the controller no longer lists it.

    The controller forgets a job some minutes after its end, and a site may run without accounting. A
    controller that does not answer (it restarts, it is busy) gives no information about the job.
    """
    slurm = Inquiry()
    answer = slurm.ask(*_SHOW, job_id)
    if answer.returncode == 0:
        fields = _fields(answer.stdout)
        return JobState(fields.get("JobState", SILENT), fields.get("Reason", ""))
    if "Invalid job id" not in answer.stderr:
        return JobState(SILENT)
    recorded = slurm.ask("sacct", "-X", "-n", "-P", "-j", job_id, "-o", "State")
    if recorded.returncode == 0 and (state := recorded.stdout.split()):
        return JobState(state[0])  # the state may be "CANCELLED by 1000"
    return JobState(SILENT if recorded.returncode == UNANSWERED else FORGOTTEN)


def states_by_accounting(job_ids: Sequence[str], *, slurm: Inquiry | None = None) -> dict[str, JobState]:
    """The states of all given jobs, with one call of sacct and one of squeue.

    squeue gives the states of jobs that accounting does not list, and the reasons of pending jobs.
    """
    if not job_ids:
        return {}
    slurm = slurm or Inquiry()
    recorded = slurm.ask("sacct", "-X", "-n", "-P", "-j", ",".join(job_ids), "-o", _SACCT_COLUMNS)
    states = _parsed(recorded.stdout) if recorded.returncode == 0 else {}
    rest = [job for job in job_ids if job not in states or states[job].state == "PENDING"]
    queued, answered = _queued(rest, slurm)
    answered = answered and recorded.returncode != UNANSWERED  # only accounting knows jobs that ended
    states = {job: JobState(FORGOTTEN if answered else SILENT) for job in rest} | states | queued
    return {job: states[job] for job in job_ids}


def _queued(job_ids: Sequence[str], slurm: Inquiry) -> tuple[dict[str, JobState], bool]:
    """The states of the jobs that squeue lists, and whether it answered."""
    if not job_ids:
        return {}, True
    arrays = ",".join(dict.fromkeys(job.partition("_")[0] for job in job_ids))
    listed = slurm.ask("squeue", "-h", "-r", "-t", "all", "-j", arrays, "-o", "%i|%A|%T|%M|%l|%r")
    states = _parsed(listed.stdout)
    answered = listed.returncode == 0 or "Invalid job id" in listed.stderr
    return {job: states[job] for job in job_ids if job in states}, answered


def never_starting(job_ids: Sequence[str], *, within_s: float) -> dict[str, str]:
    """Job id -> the reason why it can never start, for the jobs that the scheduler rejects within `within_s`.

    Many sites queue a job that requests more than exists (EnforcePartLimits=NO). The error of `--test-only`
    is not enough: Slurm prints the same one if hosts are down for a while.
    """
    deadline = time.monotonic() + within_s
    while any(map(_is_unexamined, (states := job_states(job_ids)).values())) and time.monotonic() < deadline:
        time.sleep(0.1)
    return {
        job: state.reason for job, state in states.items()
        if state.state == "PENDING" and state.reason in _PERMANENT
    }  # fmt: skip


def _is_unexamined(state: JobState) -> bool:
    return state.state == "PENDING" and state.reason in ("", "None")


def jobs_by_script(slurm: Inquiry) -> dict[str, tuple[str, JobState]] | None:
    """Batch script -> this user's pending or running job of that script, and its state.

    None if Slurm does not answer.
    """
    listed = slurm.ask("squeue", "-h", "--me", "-o", "%i|%T|%r|%o")
    if listed.returncode != 0:
        return None
    lines = [line.split("|", 3) for line in listed.stdout.splitlines() if line.count("|") > 2]
    return {script: (job, JobState(state, reason)) for job, state, reason, script in lines}


def scripts_of(job_ids: Sequence[str], slurm: Inquiry) -> dict[str, str] | None:
    """Job id -> batch script, for this user's jobs in the queue; None if Slurm does not answer."""
    arrays = ",".join(dict.fromkeys(job.partition("_")[0] for job in job_ids))
    listed = slurm.ask("squeue", "-h", "-r", "--me", "-t", "all", "-j", arrays, "-o", "%i|%A|%o")
    if listed.returncode != 0 and "Invalid job id" not in listed.stderr:
        return None
    scripts: dict[str, str] = {}
    for line in listed.stdout.splitlines():
        if line.count("|") > 1:
            job, raw_id, script = line.split("|", 2)
            scripts |= dict.fromkeys((*_tasks(job), raw_id), script)
    return scripts


def job_fields(job_id: str) -> dict[str, str] | None:
    """The controller's record of a job; None if it does not answer or no longer has a record."""
    answer = Inquiry().ask(*_SHOW, job_id)
    return _fields(answer.stdout) if answer.returncode == 0 else None


def _parsed(text: str) -> dict[str, JobState]:
    """Job id -> state, from lines `id|raw id|state|time|limit|reason`; array tasks are under both ids."""
    states: dict[str, JobState] = {}
    for line in text.splitlines():
        if line.count("|") < 2 or not line.split("|")[2]:
            continue
        job, raw_id, state, passed, limit, reason, *_ = [*line.split("|", 5), "", "", ""]
        word = state.split()[0]  # the state may be "CANCELLED by 1000"
        left_s = _left_s(passed, limit) if word == "RUNNING" else None
        states |= dict.fromkeys((*_tasks(job), raw_id), JobState(word, reason, left_s))
    return states


def _left_s(passed: str, limit: str) -> float | None:
    """The time until a limit; None if the limit is UNLIMITED, or if one of the two times is missing."""
    passed_s, limit_s = seconds_of(passed), seconds_of(limit)
    return None if passed_s is None or limit_s is None else max(0.0, limit_s - passed_s)


def _tasks(job: str) -> list[str]:
    """Expand pending tasks `12_[0-2,7%3]` to `12_0`, `12_1`, ...; any other id is returned unchanged."""
    array, bracket, rest = job.partition("_[")
    if not bracket:
        return [job]
    try:
        numbers = expand_numbers(rest.rstrip("]").partition("%")[0])
    except ValueError:
        return [job]
    return [f"{array}_{number}" for number in numbers]


def _fields(line: str) -> dict[str, str]:
    return dict(field.split("=", 1) for field in line.split() if "=" in field)
