"""What Slurm says of a job, from whichever of its commands answers."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
    "REVOKED", "TIMEOUT",
}  # fmt: skip
SILENT = "NO ANSWER"  # no state of Slurm's: its controller is away, the job may go on
FORGOTTEN = "FORGOTTEN"  # nor this: Slurm knows the job no longer

_SHOW = ("scontrol", "--oneliner", "show", "job")


@dataclass(frozen=True)
class JobState:
    """One of Slurm's job states, and its reason (why it waits, or how it ended)."""

    state: str
    reason: str = ""

    @property
    def ended(self) -> bool:
        return self.state in ENDED or self.state == FORGOTTEN

    def __str__(self) -> str:
        return self.state.lower() + (f" ({self.reason})" if self.reason not in ("", "None") else "")


def job_of(environment: Mapping[str, str]) -> str | None:
    """The job that these are the variables of, as sacct, scancel and scontrol take it: `123`, or `123_4` of
    an array, whose raw id only Slurm knows."""
    if "SLURM_ARRAY_JOB_ID" in environment and "SLURM_ARRAY_TASK_ID" in environment:
        return f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment.get("SLURM_JOB_ID")


def job_states(job_ids: Sequence[str]) -> dict[str, JobState]:
    """The states of many jobs at once, tasks of arrays too, of those that squeue still knows."""
    return _queued(job_ids)[0]


def job_state(job_id: str) -> JobState:
    """The controller's word, or after it has forgotten the job that of accounting.

    A site may run without accounting, and the controller forgets a job some minutes after its end; one
    that does not answer (a restart, a busy hour) says nothing of the job.
    """
    shown = _ask(*_SHOW, job_id)
    if shown.returncode == 0:
        fields = _fields(shown.stdout)
        return JobState(fields["JobState"], fields.get("Reason", ""))
    if "Invalid job id" not in shown.stderr:
        return JobState(SILENT)
    recorded = _ask("sacct", "-X", "-n", "-P", "-j", job_id, "-o", "State")
    if recorded.returncode == 0 and (words := recorded.stdout.split()):
        return JobState(words[0])  # "CANCELLED by 1000"
    return JobState(FORGOTTEN)


def states_by_accounting(job_ids: Sequence[str]) -> dict[str, JobState]:
    """The states of many jobs, each of them, by one call of sacct, and one of squeue for those that
    accounting does not know and for why the others wait."""
    if not job_ids:
        return {}
    recorded = _ask("sacct", "-X", "-n", "-P", "-j", ",".join(job_ids), "-o", "JobID,JobIDRaw,State")
    known = _listed(recorded.stdout) if recorded.returncode == 0 else {}
    rest = [job for job in job_ids if job not in known or known[job].state == "PENDING"]
    queued, answered = _queued(rest)
    known = {job: JobState(FORGOTTEN if answered else SILENT) for job in rest} | known | queued
    return {job: known[job] for job in job_ids}


def _queued(job_ids: Sequence[str]) -> tuple[dict[str, JobState], bool]:
    """Of those that squeue knows, and whether it answered."""
    if not job_ids:
        return {}, True
    whole = ",".join(dict.fromkeys(job.partition("_")[0] for job in job_ids))
    listed = _ask("squeue", "-h", "-r", "-t", "all", "-j", whole, "-o", "%i|%A|%T|%r")
    known = _listed(listed.stdout)
    answered = listed.returncode == 0 or "Invalid job id" in listed.stderr
    return {job: known[job] for job in job_ids if job in known}, answered


def job_fields(job_id: str) -> dict[str, str] | None:
    """The controller's record of a job; None where it does not answer or knows it no longer."""
    shown = _ask(*_SHOW, job_id)
    return _fields(shown.stdout) if shown.returncode == 0 else None


def _listed(text: str) -> dict[str, JobState]:
    """From lines `id|raw id|state|reason`; of an array's tasks both ids are known."""
    known = {}
    for line in text.splitlines():
        job, raw, state, *reason = line.split("|")
        for each in (*_tasks(job), raw):
            known[each] = JobState(state.split()[0], *reason)  # "CANCELLED by 1000"
    return known


def _tasks(job: str) -> list[str]:
    """`12_[0-2,7%3]`, tasks that wait, as `12_0`, `12_1`, ...; any other id as it is."""
    array, bracket, rest = job.partition("_[")
    if not bracket:
        return [job]
    found = []
    for part in rest.rstrip("]").partition("%")[0].split(","):
        first, _, last = part.partition("-")
        found += [f"{array}_{task}" for task in range(int(first), int(last or first) + 1)]
    return found


def _fields(line: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


def _ask(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "SLURM_BITSTR_LEN": "0"}  # an array's tasks that wait, all of them
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, env=environment)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, returncode=1, stdout="", stderr=str(error))
