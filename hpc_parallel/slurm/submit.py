"""Submits, requeues and cancels jobs, and reads what sbatch prints."""

from __future__ import annotations

import getpass
import os
import re
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from subprocess import CompletedProcess

from hpc_parallel.slurm.client import (
    CONTROL_S,
    MISSING,
    UNANSWERED,
    Inquiry,
    announcements,
    is_installed,
    run,
    submission_environment,
)
from hpc_parallel.slurm.jobs import Job, by_cluster, scripts_in_queue
from hpc_parallel.slurm.limits import partitions
from hpc_parallel.slurm.records import associations_of

ANSWER_S = 60.0  # after a lost answer, how long to ask the controller whether it has the job
_JOB = re.compile(r"^(?:Submitted batch job )?(\d+)(?:(?:;| on cluster )(\S+))?\s*$", re.MULTILINE)
_UNCLEAR = "sbatch did not say which job it has submitted"
_LOST = re.compile(
    rf"timed out|communication connection|contact slurm controller|zero bytes|{_UNCLEAR}", re.IGNORECASE
)


class SiteRefusedError(RuntimeError):
    """Slurm refused a request; the message contains Slurm's message."""


class UnclearError(SiteRefusedError):
    """sbatch did not say which job it has submitted. jobs: those of its script; None: Slurm is silent."""

    def __init__(self, message: str, jobs: Sequence[str] | None) -> None:
        super().__init__(message)
        self.jobs = jobs


def is_lost(message: str) -> bool:
    """Whether only Slurm's answer was lost: it may have taken the job."""
    return _LOST.search(message) is not None


def require_sbatch() -> None:
    """Raises SiteRefusedError if there is no sbatch here."""
    if not is_installed():
        raise SiteRefusedError("there is no sbatch on this machine; launcher=local runs here")


def submit_script(script: Path) -> Job:
    """Submit a batch script. Raises SiteRefusedError with Slurm's message."""
    require_sbatch()
    warn_of_overrides(script.read_text(encoding="utf-8"))
    try:
        return _sbatch(script)
    except SiteRefusedError as error:
        raise refusal(error, scripts=script.parent) from error


def resubmit(script: Path, *, exclude: str, after: str = "") -> Job:
    """Submit the script of a job that ends; returns the new job.

    exclude: hosts to avoid. after: the job that must have ended before. Both may be empty.

    Slurm leaves the job little time, so sbatch and the question for its job have CONTROL_S together.

    Raises SiteRefusedError with sbatch's message.
    """
    flags = [f"--exclude={exclude}"] if exclude else []
    flags += [f"--dependency=afterany:{after}"] if after else []
    return _sbatch(script, *flags, within_s=CONTROL_S)


def _sbatch(script: Path, *flags: str, within_s: float | None = None) -> Job:
    try:
        text = script.read_text(encoding="utf-8")
    except OSError as error:
        raise SiteRefusedError(str(error)) from error
    began_s = time.time()
    until = None if within_s is None else time.monotonic() + within_s
    environment = submission_environment(os.environ, script=text)
    answer = run("sbatch", "--parsable", *flags, str(script), waits_s=(within_s,), environment=environment)
    if answer.returncode != 0:
        raise SiteRefusedError(answer.stderr.strip())
    return replace(job_in(answer.stdout, scripts=script.parent, until=until), submitted_s=began_s)


def job_in(output: str, *, scripts: Path, until: float | None = None) -> Job:
    """The job in the output of sbatch, where a site may add other lines, or print JSON.

    If the output does not tell, it is the only job with a script in the folder `scripts`. until: how long to
    ask Slurm for it, on the monotonic clock; by default for ANSWER_S.

    Raises UnclearError.
    """
    jobs = _JOB.findall(output)
    ids, clusters = {job for job, _ in jobs}, {cluster for _, cluster in jobs if cluster}
    if len(ids) != 1 or len(clusters) > 1:
        excerpt = f"{_UNCLEAR}. It printed: {' '.join(output.split())[:200] or 'nothing'}"
        of_scripts = _jobs_of(scripts, until=until)
        clusters, ids = set(), set(of_scripts or ())
        ids.discard(os.environ.get("SLURM_JOB_ID", ""))  # a job that ends, and submits its script again
        if len(ids) != 1:
            raise UnclearError(excerpt, of_scripts)
        print(f"warning     {excerpt}. Slurm has one job of this script, {next(iter(ids))}", file=sys.stderr)
    return Job(ids.pop(), clusters.pop() if clusters else None)


def refusal(error: Exception, *, scripts: Path) -> SiteRefusedError:
    """The error for a failed submission of a script in the folder `scripts`. error: has the output of sbatch.

    If only Slurm's answer was lost, Slurm may have accepted the job. This function then cancels the job.
    """
    text = str(error)
    if not is_lost(text):
        return SiteRefusedError(refusal_message(text))
    jobs = error.jobs if isinstance(error, UnclearError) else _jobs_of(scripts)
    if jobs == []:
        return SiteRefusedError(refusal_message(text))
    message = f"Slurm's answer was lost: {' '.join(text.split())}\n  "
    if jobs is None:
        return SiteRefusedError(f"{message}It may have taken the job. When it answers, see squeue --me.")
    if len(jobs) > 1:  # one of them may be older
        return SiteRefusedError(f"{message}It may have taken one of jobs {', '.join(jobs)}: see squeue --me.")
    withdraw(map(Job, jobs))
    return SiteRefusedError(f"{message}It had taken job {jobs[0]}, which is cancelled. Submit again.")


def _jobs_of(scripts: Path, *, until: float | None = None) -> list[str] | None:
    """The jobs whose batch script is in the folder `scripts`; None if Slurm does not answer in time."""
    deadline = time.monotonic() + ANSWER_S if until is None else until
    while (jobs := scripts_in_queue(Inquiry(until=deadline))) is None:
        if time.monotonic() + 1 > deadline:
            return None
        time.sleep(1)
    ids = (job.partition("_")[0] for script, job, _ in jobs if Path(script).parent == scripts)
    return list(dict.fromkeys(ids))


def refusal_message(text: str) -> str:
    """Slurm's error lines, plus the partitions or the accounts that the user could name instead."""
    lines = [line for line in text.splitlines() if line.startswith("sbatch:")] or text.splitlines()
    message = "Slurm refused the job; nothing was submitted.\n  " + "\n  ".join(lines)
    if re.search("partition|node(?! name)", text, re.IGNORECASE) and (names := partitions()):
        message += f"\n  Partitions here: {', '.join(names)}."
    if "account" in text.lower() and (found := associations_of(getpass.getuser())):
        message += f"\n  Your accounts: {', '.join(association.account for association in found)}."
    if re.search("generic resource|gres|--gpus", text, re.IGNORECASE):
        message += "\n  Try cluster=gres if the site needs --gres, or cluster=cpu if it has no GPUs."
    return message


def warn_of_overrides(script: str) -> None:
    """Print how SBATCH_* of the user's shell are used. A sweep of many scripts prints it once."""
    _warn_of(tuple(announcements(os.environ, script=script)))


@cache
def _warn_of(lines: tuple[str, ...]) -> None:
    for line in lines:
        print(f"warning     {line}", file=sys.stderr)


def dry_submit(script: str, *, within_s: float | None = None) -> CompletedProcess[str]:
    """Ask `sbatch --test-only` whether Slurm would start the script now or later; stderr has the answer."""
    environment = submission_environment(os.environ, script=script)
    return run("sbatch", "--test-only", waits_s=(within_s,), stdin=script, environment=environment)


def estimate(script: str) -> str:
    """Slurm's message about when it would start this script, or why not; nothing is submitted."""
    answer = dry_submit(script, within_s=20.0)
    if answer.returncode in (UNANSWERED, MISSING):
        return f"no estimate of its start: {answer.stderr}"
    return " ".join(answer.stderr.split()) or "Slurm gives no estimate of its start"


def requeue(job: str, *, exclude: str | None) -> str | None:
    """Requeue a job, without the hosts `exclude`; None: those that it leaves out already.

    Returns Slurm's message if Slurm refuses, otherwise None.
    """
    answer = _scontrol("requeue", job)
    if answer.returncode != 0:
        return answer.stderr.strip() or "scontrol requeue failed"
    if exclude is not None:
        answer = _scontrol("update", f"JobId={job}", f"ExcNodeList={exclude}")
        if answer.returncode != 0:
            reason = answer.stderr.strip() or "scontrol update failed"
            print(f"WARNING: job {job} is requeued without ExcNodeList={exclude}: {reason}", file=sys.stderr)
    return None


def _scontrol(*arguments: str) -> CompletedProcess[str]:
    return run("scontrol", *arguments, waits_s=(CONTROL_S,))


def scancel(jobs: Iterable[str], *, cluster: str | None = None) -> CompletedProcess[str]:
    return run("scancel", *jobs, waits_s=(CONTROL_S,), cluster=cluster)


def withdraw(jobs: Iterable[Job]) -> None:
    """Cancel jobs that are no longer wanted. Print Slurm's message if there is one."""
    for cluster, of_cluster in by_cluster(jobs).items():
        if message := scancel([job.id for job in of_cluster], cluster=cluster).stderr.strip():
            print(message, file=sys.stderr)
