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
_UNANSWERED = 124  # as of timeout(1)
_PROMPT_S = 1.0  # after which we look whether the controller is there at all
_PING_S = 2.0
_PATIENCE_S = 20.0  # with a busy one


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


class Inquiry:
    """Questions to Slurm for somebody who waits. While it is there it may take its time over an answer; that
    it is not (its controller down, slurm.conf away) takes three seconds once, however much is asked."""

    def __init__(self) -> None:
        self.silent = False

    def ask(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Return code `_UNANSWERED` where there is no answer."""
        unanswered = subprocess.CompletedProcess(command, returncode=_UNANSWERED, stdout="", stderr="")
        if self.silent:
            return unanswered
        environment = {**os.environ, "SLURM_BITSTR_LEN": "0"}  # an array's tasks that wait, all of them
        try:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", errors="replace",
                env=environment,
            )  # fmt: skip
        except (OSError, ValueError) as error:
            return subprocess.CompletedProcess(command, returncode=1, stdout="", stderr=str(error))
        with process:
            for more_s in (_PROMPT_S, _PATIENCE_S):
                try:
                    out, err = process.communicate(timeout=more_s)
                    return subprocess.CompletedProcess(command, process.returncode, out, err)
                except subprocess.TimeoutExpired:
                    self.silent = not controller_answers(within_s=_PING_S)
                if self.silent:
                    break
            process.kill()
        return unanswered


def controller_answers(*, within_s: float) -> bool:
    try:
        answer = subprocess.run(["scontrol", "ping"], capture_output=True, timeout=within_s, text=True)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return answer.returncode == 0 and "UP" in answer.stdout


def job_of(environment: Mapping[str, str]) -> str | None:
    """The job that these are the variables of, as sacct, scancel and scontrol take it: `123`, or `123_4` of
    an array, whose raw id only Slurm knows."""
    if "SLURM_ARRAY_JOB_ID" in environment and "SLURM_ARRAY_TASK_ID" in environment:
        return f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment.get("SLURM_JOB_ID")


def job_states(job_ids: Sequence[str]) -> dict[str, JobState]:
    """The states of many jobs at once, tasks of arrays too, of those that squeue still knows."""
    return _queued(job_ids, Inquiry())[0]


def job_state(job_id: str) -> JobState:
    """The controller's word, or after it has forgotten the job that of accounting.

    A site may run without accounting, and the controller forgets a job some minutes after its end; one
    that does not answer (a restart, a busy hour) says nothing of the job.
    """
    slurm = Inquiry()
    shown = slurm.ask(*_SHOW, job_id)
    if shown.returncode == 0:
        fields = _fields(shown.stdout)
        return JobState(fields.get("JobState", SILENT), fields.get("Reason", ""))
    if "Invalid job id" not in shown.stderr:
        return JobState(SILENT)
    recorded = slurm.ask("sacct", "-X", "-n", "-P", "-j", job_id, "-o", "State")
    if recorded.returncode == 0 and (words := recorded.stdout.split()):
        return JobState(words[0])  # "CANCELLED by 1000"
    return JobState(SILENT if recorded.returncode == _UNANSWERED else FORGOTTEN)


def states_by_accounting(job_ids: Sequence[str], *, slurm: Inquiry | None = None) -> dict[str, JobState]:
    """The states of many jobs, each of them, by one call of sacct, and one of squeue for those that
    accounting does not know and for why the others wait."""
    if not job_ids:
        return {}
    slurm = slurm or Inquiry()
    recorded = slurm.ask("sacct", "-X", "-n", "-P", "-j", ",".join(job_ids), "-o", "JobID,JobIDRaw,State")
    known = _listed(recorded.stdout) if recorded.returncode == 0 else {}
    rest = [job for job in job_ids if job not in known or known[job].state == "PENDING"]
    queued, answered = _queued(rest, slurm)
    answered = answered and recorded.returncode != _UNANSWERED  # of what has ended only accounting knows
    known = {job: JobState(FORGOTTEN if answered else SILENT) for job in rest} | known | queued
    return {job: known[job] for job in job_ids}


def _queued(job_ids: Sequence[str], slurm: Inquiry) -> tuple[dict[str, JobState], bool]:
    """Of those that squeue knows, and whether it answered."""
    if not job_ids:
        return {}, True
    whole = ",".join(dict.fromkeys(job.partition("_")[0] for job in job_ids))
    listed = slurm.ask("squeue", "-h", "-r", "-t", "all", "-j", whole, "-o", "%i|%A|%T|%r")
    known = _listed(listed.stdout)
    answered = listed.returncode == 0 or "Invalid job id" in listed.stderr
    return {job: known[job] for job in job_ids if job in known}, answered


def jobs_by_script(slurm: Inquiry) -> dict[str, tuple[str, JobState]]:
    """Batch script -> the job of this user that is to run it or does, and how it stands."""
    listed = slurm.ask("squeue", "-h", "--me", "-o", "%i|%T|%r|%o")
    lines = [line.split("|", 3) for line in listed.stdout.splitlines() if line.count("|") > 2]
    return {script: (job, JobState(state, reason)) for job, state, reason, script in lines}


def scripts_of(job_ids: Sequence[str], slurm: Inquiry) -> dict[str, str] | None:
    """Job id -> its batch script, of those jobs in the queue that are this user's; None without an answer."""
    whole = ",".join(dict.fromkeys(job.partition("_")[0] for job in job_ids))
    listed = slurm.ask("squeue", "-h", "-r", "--me", "-t", "all", "-j", whole, "-o", "%i|%A|%o")
    if listed.returncode != 0 and "Invalid job id" not in listed.stderr:
        return None
    known: dict[str, str] = {}
    for line in listed.stdout.splitlines():
        if line.count("|") > 1:
            job, raw, script = line.split("|", 2)
            known |= dict.fromkeys((*_tasks(job), raw), script)
    return known


def job_fields(job_id: str) -> dict[str, str] | None:
    """The controller's record of a job; None where it does not answer or knows it no longer."""
    shown = Inquiry().ask(*_SHOW, job_id)
    return _fields(shown.stdout) if shown.returncode == 0 else None


def _listed(text: str) -> dict[str, JobState]:
    """From lines `id|raw id|state|reason`; of an array's tasks both ids are known."""
    known = {}
    for line in text.splitlines():
        if line.count("|") < 2 or not line.split("|")[2]:
            continue
        job, raw, state, *reason = line.split("|", 3)
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
