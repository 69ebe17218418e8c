"""The state of Slurm jobs, from the queue, or from accounting for jobs that the queue does not list."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from subprocess import CompletedProcess

from hpc_parallel.slurm.client import Inquiry, run
from hpc_parallel.slurm.short_forms import expand_hosts, expand_numbers, seconds_of

ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
    "TIMEOUT",
}  # fmt: skip
# These three are not states of Slurm.
SILENT = "NO ANSWER"  # the controller or accounting does not answer; the job may still run
UNKNOWN = "UNKNOWN"  # the answers do not say whether the job runs; the reason says why
FORGOTTEN = "FORGOTTEN"  # Slurm no longer has a record of the job
ELSEWHERE = "it runs on another cluster of the federation, see squeue --federation --me"
NOT_YET = "Slurm does not list it yet"
NO_ACCOUNTING = "the queue does not list it, and accounting does not answer"
DENIED = "accounting has it as {}, and the controller does not know it"

_COLUMNS = "JobID,JobIDRaw,State,Elapsed,Timelimit,End"
_SACCT = ("sacct", "-X", "-n", "-P", "-o", _COLUMNS)
# `--all`: also jobs of hidden partitions.
_SQUEUE = ("squeue", "--all", "-h", "-r", "-t", "all", "-o")
_SHOW = ("scontrol", "--oneliner", "--all", "show", "job")
_ROW = re.compile(r"\d+[^|]*\|\d+\|")  # job id and raw id
_PIECE = 1000  # jobs in one question: Linux limits an argument to 128 KiB
_PATIENCE_S = 20.0  # a lost host does not answer
_MIN_JOB_AGE_S = 300.0  # how long a controller lists a job after its end, by default
_CLOCKS_S = 300.0  # munge refuses a host whose clock differs by more
_REQUEUED = {"BOOT_FAIL", "NODE_FAIL", "PREEMPTED"}  # ends after which Slurm may start the job again
_PERMANENT = {
    "BadConstraints", "InvalidAccount", "InvalidQOS", "PartitionConfig", "PartitionNodeLimit",
    "PartitionTimeLimit",
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A job or an array task.

    id: `123` or `123_4`. cluster: the one that took it; None: the one that the shell selects. submitted_s:
    since 1970; None: unknown.
    """

    id: str
    cluster: str | None = None
    submitted_s: float | None = None

    @property
    def array(self) -> str:
        return self.id.partition("_")[0]

    @property
    def is_new(self) -> bool:
        """Whether a controller that does not list the job can't have forgotten it."""
        return self.submitted_s is not None and abs(time.time() - self.submitted_s) < _MIN_JOB_AGE_S


@dataclass(frozen=True)
class JobState:
    """A job state of Slurm and its reason (why the job waits, or how it ended).

    left_s: the time until the time limit of a running job; None if the job has no limit, or it is unknown.
    end_s: when the job ended or must end, since 1970.
    """

    state: str
    reason: str = ""
    left_s: float | None = field(default=None, compare=False)
    end_s: float | None = field(default=None, compare=False)

    @property
    def ended(self) -> bool:
        return self.state in ENDED or self.state == FORGOTTEN

    @property
    def is_known(self) -> bool:
        return self.state not in (SILENT, UNKNOWN, FORGOTTEN)

    def __str__(self) -> str:
        return self.state.lower() + (f" ({self.reason})" if self.reason not in ("", "None") else "")


def job_of(environment: Mapping[str, str]) -> str | None:
    """The job id in Slurm's variables, as sacct, scancel and scontrol accept it: `123` or `123_4`.

    An array task is named by its array and number, as the submission names it.
    """
    if "SLURM_ARRAY_JOB_ID" in environment and "SLURM_ARRAY_TASK_ID" in environment:
        return f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment.get("SLURM_JOB_ID")


def by_cluster(jobs: Iterable[Job]) -> dict[str | None, list[Job]]:
    clusters: dict[str | None, list[Job]] = {}
    for job in jobs:
        clusters.setdefault(job.cluster, []).append(job)
    return clusters


def queued_states(jobs: Iterable[Job]) -> dict[Job, JobState]:
    """The states of those jobs that the queue still lists."""
    slurm = Inquiry()
    states: dict[Job, JobState] = {}
    for of_cluster in by_cluster(jobs).values():
        listed = _queue(of_cluster, slurm)[0]
        states |= {job: listed[job.id] for job in of_cluster if job.id in listed}
    return states


def job_state(job: Job) -> JobState:
    return job_states([job])[job]


def job_states(jobs: Iterable[Job], *, slurm: Inquiry | None = None) -> dict[Job, JobState]:
    """The states of all jobs, with one question to the queue and one to accounting.

    The queue has precedence: accounting may be late, or have an older job of the same number. A controller
    forgets a job some minutes after its end, and a task of an array at once that is cancelled before it has
    begun; a site may run without accounting. A controller that does not answer (it restarts, it is busy)
    gives no information about the job.
    """
    slurm = slurm or Inquiry()
    states: dict[Job, JobState] = {}
    for of_cluster in by_cluster(jobs).values():
        queued, queue_answers = _queue(of_cluster, slurm)
        rest = [job for job in of_cluster if job.id not in queued]
        lines, accounting_answers = _ask(rest, slurm, *_SACCT)
        records = _parsed(lines)
        arrays = {job.array for job in of_cluster if job.id in queued}
        for job in rest:
            record = records.get(job.id)
            if record is not None and not _is_older(record, job):
                states[job] = _recorded(record, queue_answers=queue_answers)
            elif not queue_answers:
                states[job] = JobState(SILENT)
            elif job.is_new and job.array not in arrays:
                states[job] = JobState(UNKNOWN, NOT_YET)
            else:
                forgotten = JobState(FORGOTTEN)
                states[job] = forgotten if accounting_answers else JobState(UNKNOWN, NO_ACCOUNTING)
        states |= {job: queued[job.id] for job in of_cluster if job.id in queued}
    return states


def _recorded(record: JobState, *, queue_answers: bool) -> JobState:
    """The state of a job that accounting has and the queue does not list."""
    if not queue_answers:
        return JobState(SILENT) if record.state in _REQUEUED else record
    if record.ended or not record.is_known:
        return record
    return JobState(UNKNOWN, DENIED.format(record.state.lower()))


def _is_older(record: JobState, job: Job) -> bool:
    """Whether an accounting record is that of an earlier job: a controller may start again with number 1."""
    if not record.ended or record.end_s is None or job.submitted_s is None:
        return False
    return record.end_s < job.submitted_s - _CLOCKS_S


def _queue(jobs: Sequence[Job], slurm: Inquiry) -> tuple[dict[str, JobState], bool]:
    lines, answers = _ask(jobs, slurm, *_SQUEUE, "%i|%A|%T|%M|%l|%e|%r")
    return _parsed(lines), answers


def _ask(jobs: Sequence[Job], slurm: Inquiry, *command: str) -> tuple[list[str], bool]:
    """The rows that a command prints for jobs of one cluster, and whether it answers."""
    ids = list(dict.fromkeys(job.array for job in jobs))
    lines: list[str] = []
    answers = True
    for start in range(0, len(ids), _PIECE):
        listed = ",".join(ids[start : start + _PIECE])
        answer = slurm.ask(*command, "-j", listed, cluster=jobs[0].cluster)
        rows = _rows(answer)
        answers = answers and _is_answer(answer, rows)
        lines += rows
    return lines, answers


def _rows(answer: CompletedProcess[str]) -> list[str]:
    return [line for line in answer.stdout.splitlines() if _ROW.match(line)]


def _is_answer(answer: CompletedProcess[str], rows: Sequence[str]) -> bool:
    """Whether Slurm does not know the jobs that are not in the rows. Errors and other text are no answer."""
    if answer.returncode == 0:
        return bool(rows) or not answer.stdout.strip()
    return "Invalid job id" in answer.stderr or "accounting storage is disabled" in answer.stderr


def never_starting(jobs: Sequence[Job], *, within_s: float) -> dict[Job, str]:
    """Job -> the reason why it can never start, for the jobs that the scheduler rejects within `within_s`.

    Many sites queue a job that requests more than exists (EnforcePartLimits=NO). The error of `--test-only`
    is not enough: Slurm prints the same one if hosts are down for a while.
    """
    deadline = time.monotonic() + within_s
    while any(map(_is_unexamined, (states := queued_states(jobs)).values())) and time.monotonic() < deadline:
        time.sleep(0.1)
    return {
        job: state.reason for job, state in states.items()
        if state.state == "PENDING" and state.reason in _PERMANENT
    }  # fmt: skip


def _is_unexamined(state: JobState) -> bool:
    return state.state == "PENDING" and state.reason in ("", "None")


def scripts_in_queue(slurm: Inquiry) -> list[tuple[str, str, JobState]] | None:
    """The batch script, id and state of each pending or running job of this user.

    None if Slurm does not answer.
    """
    answer = slurm.ask("squeue", "--all", "-h", "--me", "-o", "%i|%A|%T|%r|%o")
    rows = _rows(answer)
    if not _is_answer(answer, rows):
        return None
    columns = [row.split("|", 4) for row in rows if row.count("|") > 3]
    return [(script, job, JobState(state, reason)) for job, _, state, reason, script in columns]


def scripts_of(jobs: Sequence[Job], slurm: Inquiry) -> dict[str, str] | None:
    """Job id -> batch script, for this user's jobs in the queue; None if Slurm does not answer."""
    scripts: dict[str, str] = {}
    for of_cluster in by_cluster(jobs).values():
        lines, answers = _ask(of_cluster, slurm, *_SQUEUE, "%i|%A|%o", "--me")
        if not answers:
            return None
        for line in lines:
            job, raw_id, script = line.split("|", 2)
            scripts |= dict.fromkeys((*_tasks(job), raw_id), script)
    return scripts


def job_fields(job_id: str) -> dict[str, str] | None:
    """The controller's record of a job; None if it does not answer or no longer has a record.

    A federation may have a second record, of the cluster that does not run the job.
    """
    answer = Inquiry().ask(*_SHOW, job_id)
    records = [_fields(line) for line in answer.stdout.splitlines() if line.startswith("JobId=")]
    if answer.returncode != 0 or not records:
        return None
    return next((record for record in records if record.get("JobState") != "REVOKED"), records[0])


def _parsed(lines: Iterable[str]) -> dict[str, JobState]:
    """Job id -> state, from lines `id|raw id|state|time|limit|end|reason`; tasks are under both their ids."""
    states: dict[str, JobState] = {}
    for line in lines:
        job, raw_id, text, passed, limit, end, reason, *_ = [*line.split("|", 6), "", "", "", ""]
        word = text.partition(" ")[0].rstrip("+")  # the state may be "CANCELLED by 1000"
        names = (*_tasks(job), raw_id)
        if word == "REVOKED":  # a federation may list the job of the other cluster, too
            states |= {name: JobState(UNKNOWN, ELSEWHERE) for name in names if name not in states}
        elif word:
            left_s = _left_s(passed, limit) if word == "RUNNING" else None
            states |= dict.fromkeys(names, JobState(word, reason, left_s, seconds_since_1970(end)))
    return states


def seconds_since_1970(text: str | None) -> float | None:
    """Slurm's local time; None for `Unknown` and the like."""
    try:
        time_s = datetime.fromisoformat(text or "").timestamp()
    except (ValueError, OverflowError):
        return None
    return time_s if math.isfinite(time_s) else None


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


def run_on_hosts(*command: str, environment: Mapping[str, str]) -> None:
    """Run a command once on each host of this job, spares included. A lost host ends the wait for it."""
    job = environment["SLURM_JOB_ID"]
    hosts = (job_fields(job) or {}).get("NodeList")  # the variables leave out spares
    nodes = len(expand_hosts(hosts)) if hosts else environment.get("SLURM_JOB_NUM_NODES", "1")
    on_each = (f"--jobid={job}", "--overlap", f"--nodes={nodes}", f"--ntasks={nodes}")
    share = ("--ntasks-per-node=1", "--cpus-per-task=1", "--mem=0", "--quiet")
    run("srun", *on_each, *share, *command, waits_s=(_PATIENCE_S,))
