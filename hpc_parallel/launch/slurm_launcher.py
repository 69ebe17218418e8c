"""Submits through submitit: one srun task for each rank, with the run folder's path as the only payload."""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
import time
from contextlib import redirect_stderr
from functools import cache
from pathlib import Path
from typing import Any

from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.slurm.slurm import SlurmExecutor

from hpc_parallel import job as job_entry
from hpc_parallel.config.job_python import job_python
from hpc_parallel.exit_codes import DONE
from hpc_parallel.launch.batch_script import (
    environment_block,
    needs_own_script,
    render,
    sbatch_flags,
    srun_arguments,
)
from hpc_parallel.launch.launcher import SiteRefusedError
from hpc_parallel.launch.prepare import PreparedRun
from hpc_parallel.record import owner
from hpc_parallel.record.job_state import Inquiry, job_state, jobs_by_script
from hpc_parallel.record.names import command_on
from hpc_parallel.record.safe_write import write_text
from hpc_parallel.record.submission_environment import as_submitter, overrides, submission_environment

ANSWER_S = 60.0  # time for a controller that lost an answer to say whether it has the job
REASON_S = 5.0  # time for the scheduler to examine a job that may be refused
PERMANENT_REASONS = {
    "BadConstraints", "InvalidAccount", "InvalidQOS", "PartitionConfig", "PartitionNodeLimit",
    "PartitionTimeLimit",
}  # fmt: skip


_JOB = re.compile(r"^(?:Submitted batch job )?(\d+)(?:;\S+| on cluster \S+)?\s*$", re.MULTILINE)
_UNCLEAR = "sbatch did not say which job it has submitted"
_LOST = re.compile(
    rf"timed out|communication connection|contact slurm controller|zero bytes|{_UNCLEAR}", re.IGNORECASE
)


class Executor(SlurmExecutor):
    """submitit's executor; it also works without Slurm for a preview, and returns the script to submit."""

    @classmethod
    def affinity(cls) -> int:
        return 2

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        return job_id_in(string if isinstance(string, str) else string.decode(errors="replace"))

    @property
    def script(self) -> str:
        return self._make_submission_file_text(self._submitit_command_str, "")


class SlurmLauncher:
    """Submits the job, and follows it if `launcher.wait` is true."""

    def preview(self, run: PreparedRun) -> str:
        return render(run) if needs_own_script(run) else executor(run).script

    def start(self, run: PreparedRun) -> None:
        self._submit(run)

    def launch(self, run: PreparedRun) -> int:
        job_id = self._submit(run)
        path = run.folder.path
        print(f"job         {job_id}")
        print(f"run folder  {path}")
        print(f"follow      {command_on(path, 'logs', '--follow')}")
        print(f"cancel      {command_on(path, 'cancel')}", flush=True)
        if not run.config.launcher.wait:
            return DONE
        from hpc_parallel.launch.wait import wait_for_job

        return wait_for_job(run, job_id)

    def _submit(self, run: PreparedRun) -> str:
        with run.written():
            return submit(run)


def executor(run: PreparedRun) -> Executor:
    """submitit's executor with all sbatch parameters of the run."""
    flags = sbatch_flags(run)
    renamed = {"job-name": "job_name", "ntasks-per-node": "ntasks_per_node", "cpus-per-task": "cpus_per_task"}
    named = ("nodes", "time", *renamed)  # submitit has parameters for these; the rest are extra flags
    parameters: dict[str, Any] = {renamed.get(flag, flag): flags.pop(flag) for flag in named}
    parameters["signal_delay_s"] = int(str(flags.pop("signal")).partition("@")[2])  # submitit sends USR2 too
    submitter = Executor(folder=run.folder.slurm, python=shlex.quote(job_python(run.config.launcher)))
    submitter.update_parameters(
        **parameters,
        wckey=None,  # some sites refuse submitit's default
        additional_parameters=flags,
        setup=environment_block(run, log_suffix="_0_log.out").split("\n"),
        srun_args=srun_arguments(run),
        stderr_to_stdout=True,
    )
    return submitter


def submit(run: PreparedRun) -> str:
    """Submit the run; returns the job id. Raises SiteRefusedError with Slurm's message."""
    run.folder.slurm.mkdir(mode=0o700, exist_ok=run.resumes)
    submitter = None if needs_own_script(run) else executor(run)
    script = submitter.script if submitter is not None else render(run)
    try:
        accepted, message = test_only(script)
    except FileNotFoundError as error:
        raise _no_sbatch() from error
    job_id, script = _submit_script(run, script) if submitter is None else _submit_payload(run, submitter)
    try:
        if not accepted and (reason := permanent_reason(job_id)):
            raise SiteRefusedError(refusal_message(f"{message} ({reason})"))
        owner.hand_to_job(run.folder, job_id)
        write_text(run.folder.resubmission, render(run))
        write_text(run.folder.batch_script, script)
    except BaseException:  # a full disk, Ctrl-C
        subprocess.run(["scancel", job_id], check=False)
        raise
    return job_id


def _submit_payload(run: PreparedRun, submitter: Executor) -> tuple[str, str]:
    """Submit through submitit; returns the job id and the script that Slurm got."""
    warn_of_overrides(submitter.script)
    try:
        # submitit prints a refusal, which the exception below repeats
        with as_submitter(submitter.script), redirect_stderr(io.StringIO()):
            job = submitter.submit(job_entry.rank, str(run.folder.path))
    except (FailedJobError, FailedSubmissionError, SiteRefusedError) as error:
        raise refusal(str(error), scripts=run.folder.slurm) from error
    return str(job.job_id), job.paths.submission_file.read_text(encoding="utf-8")


def _submit_script(run: PreparedRun, script: str) -> tuple[str, str]:
    """As `_submit_payload`, for a script of our own templates."""
    write_text(run.folder.batch_script, script)
    return sbatch(run.folder.batch_script), script


def sbatch(script: Path) -> str:
    """Submit a batch script and return its job id. Raises SiteRefusedError with Slurm's message."""
    text = script.read_text(encoding="utf-8")
    environment = submission_environment(os.environ, script=text)
    warn_of_overrides(text)
    try:
        process = subprocess.run(
            ["sbatch", "--parsable", str(script)], capture_output=True, text=True, env=environment
        )
    except FileNotFoundError as error:
        raise _no_sbatch() from error
    if process.returncode != 0:
        raise refusal(process.stderr, scripts=script.parent)
    try:
        return job_id_in(process.stdout)
    except SiteRefusedError as error:
        raise refusal(str(error), scripts=script.parent) from error


def job_id_in(output: str) -> str:
    """The job in what sbatch prints, around which a site may print other lines. Raises SiteRefusedError."""
    jobs = set(_JOB.findall(output))
    if len(jobs) != 1:
        shown = " ".join(output.split())[:200] or "nothing"
        raise SiteRefusedError(f"{_UNCLEAR}. It printed: {shown}")
    return str(jobs.pop())


def refusal(text: str, *, scripts: Path) -> SiteRefusedError:
    """The error for what sbatch printed when it failed to submit a script in the folder `scripts`.

    If only its answer was lost, Slurm may have taken the job: such a job is cancelled.
    """
    if not _LOST.search(text):
        return SiteRefusedError(refusal_message(text))
    jobs = _jobs_of(scripts)
    if jobs == []:
        return SiteRefusedError(refusal_message(text))
    message = f"Slurm's answer was lost: {' '.join(text.split())}\n  "
    if jobs is None:
        return SiteRefusedError(f"{message}It may have taken the job. When it answers, see squeue --me.")
    subprocess.run(["scancel", *jobs], check=False)
    return SiteRefusedError(f"{message}It had taken job {', '.join(jobs)}, which is cancelled. Submit again.")


def _jobs_of(scripts: Path) -> list[str] | None:
    """The jobs whose batch script is in the folder `scripts`; None if Slurm does not answer for a minute."""
    deadline = time.monotonic() + ANSWER_S
    while (by_script := jobs_by_script(Inquiry())) is None:
        if time.monotonic() > deadline:
            return None
        time.sleep(1)
    return [job for script, (job, _) in by_script.items() if Path(script).parent == scripts]


def warn_of_overrides(script: str) -> None:
    """Say which variables of the user's shell are not used; once, also for a sweep of many scripts."""
    _warn_of(tuple(overrides(os.environ, script=script)))


@cache
def _warn_of(names: tuple[str, ...]) -> None:
    if names:
        text = (
            f"{', '.join(names)} of this shell: not used, because the job's configuration sets the same flag"
        )
        print(f"warning     {text}", file=sys.stderr)


def _no_sbatch() -> SiteRefusedError:
    return SiteRefusedError("there is no sbatch on this machine; launcher=local runs here")


def test_only(script: str) -> tuple[bool, str]:
    """Whether Slurm would start the script now or later, and what `sbatch --test-only` prints."""
    environment = submission_environment(os.environ, script=script)
    process = subprocess.run(
        ["sbatch", "--test-only"], input=script, capture_output=True, text=True, env=environment
    )
    return process.returncode == 0, process.stderr.strip()


def permanent_reason(job_id: str) -> str | None:
    """The reason why a waiting job can never start; None if it may start later.

    Many sites queue a job that requests more than exists (EnforcePartLimits=NO). The error of `--test-only`
    is not enough: Slurm prints the same one if hosts are only down.
    """
    deadline = time.monotonic() + REASON_S
    while time.monotonic() < deadline:
        state = job_state(job_id)
        if state.state != "PENDING":
            return None
        if state.reason not in ("", "None"):  # the scheduler has examined it
            return state.reason if state.reason in PERMANENT_REASONS else None
        time.sleep(0.1)
    return None


def refusal_message(text: str) -> str:
    """Slurm's error lines, plus the site's partitions if the error is about a partition or its size."""
    lines = [line for line in text.splitlines() if line.startswith("sbatch:")] or text.splitlines()
    message = "Slurm refused the job; nothing was submitted.\n  " + "\n  ".join(lines)
    if re.search("partition|node", text, re.IGNORECASE) and (names := partitions()):
        message += f"\n  Partitions here: {', '.join(names)}."
    if re.search("generic resource|gres|--gpus", text, re.IGNORECASE):
        message += "\n  Try cluster=gres if the site needs --gres, or cluster=cpu if it has no GPUs."
    return message


def partitions() -> list[str]:
    """This site's partitions with their sizes; empty if sinfo does not answer."""
    try:
        process = subprocess.run(
            ["sinfo", "-h", "-o", "%R (%D nodes)"], capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return sorted(set(process.stdout.splitlines()))
