"""Submission through submitit: one srun task a rank, the run folder's path as the only payload."""

from __future__ import annotations

import io
import re
import shlex
import subprocess
import time
from contextlib import redirect_stderr
from typing import Any

from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.slurm.slurm import SlurmExecutor

from hpc_parallel import job as job_entry
from hpc_parallel.exit_codes import DONE
from hpc_parallel.launch.batch_script import (
    environment_block,
    job_python,
    render,
    sbatch_flags,
    srun_arguments,
)
from hpc_parallel.launch.launcher import SiteRefusedError
from hpc_parallel.launch.prepare import PreparedRun
from hpc_parallel.record import owner
from hpc_parallel.record.job_state import job_state
from hpc_parallel.record.names import command_on
from hpc_parallel.record.safe_write import write_text

REASON_S = 5.0  # for the scheduler to look at a job that it doubts
NEVER = {
    "BadConstraints", "InvalidAccount", "InvalidQOS", "PartitionConfig", "PartitionNodeLimit",
    "PartitionTimeLimit",
}  # fmt: skip


class Executor(SlurmExecutor):
    """submitit's, which also previews on a machine without Slurm and tells the script it would hand over."""

    @classmethod
    def affinity(cls) -> int:
        return 2

    @property
    def script(self) -> str:
        return self._make_submission_file_text(self._submitit_command_str, "")


class SlurmLauncher:
    """Submits and returns, or follows the job with `launcher.wait`."""

    def preview(self, run: PreparedRun) -> str:
        return executor(run).script

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
    """submitit's executor with everything that the run asks of Slurm."""
    flags = sbatch_flags(run)
    named = {"job-name": "job_name", "ntasks-per-node": "ntasks_per_node", "cpus-per-task": "cpus_per_task"}
    own = ("nodes", "time", *named)  # the rest are submitit's extra flags, sorted in with these
    parameters: dict[str, Any] = {named.get(flag, flag): flags.pop(flag) for flag in own}
    parameters["signal_delay_s"] = int(str(flags.pop("signal")).partition("@")[2])  # submitit's USR2 too
    submitter = Executor(folder=run.folder.slurm, python=shlex.quote(job_python(run)))
    submitter.update_parameters(
        **parameters,
        wckey=None,  # submitit's own is refused by some sites
        additional_parameters=flags,
        setup=environment_block(run, log_suffix="_0_log.out").split("\n"),
        srun_args=srun_arguments(run),
        stderr_to_stdout=True,
    )
    return submitter


def submit(run: PreparedRun) -> str:
    """Hand the run to Slurm; returns the job id. Raises SiteRefusedError with Slurm's words."""
    run.folder.slurm.mkdir(mode=0o700, exist_ok=run.resumes)
    submitter = executor(run)
    try:
        doubt = doubted(submitter.script)
        with redirect_stderr(io.StringIO()):  # submitit prints a refusal; we say it once, below
            job = submitter.submit(job_entry.rank, str(run.folder.path))
    except FileNotFoundError as error:
        raise SiteRefusedError("there is no sbatch on this machine; launcher=local runs here") from error
    except (FailedJobError, FailedSubmissionError) as error:
        raise SiteRefusedError(in_slurms_words(str(error))) from error
    try:
        if doubt and (reason := why_never(job.job_id)):
            raise SiteRefusedError(in_slurms_words(f"{doubt} ({reason})"))
        owner.hand_to_job(run.folder, str(job.job_id))
        write_text(run.folder.resubmission, render(run))
        write_text(run.folder.batch_script, job.paths.submission_file.read_text(encoding="utf-8"))
    except BaseException:  # a full disk, Ctrl-C
        subprocess.run(["scancel", job.job_id], check=False)
        raise
    return str(job.job_id)


def doubted(script: str) -> str | None:
    """What Slurm says against starting this script at all; None where it could start, sooner or later."""
    tried = subprocess.run(["sbatch", "--test-only"], input=script, capture_output=True, text=True)
    return tried.stderr.strip() if tried.returncode != 0 else None


def why_never(job_id: str) -> str | None:
    """The reason for which a waiting job can never start; None where it is a matter of time.

    Many sites queue a job that asks for more than there is (EnforcePartLimits=NO), and doubts alone
    don't tell: Slurm has the same ones where hosts are only down.
    """
    deadline = time.monotonic() + REASON_S
    while time.monotonic() < deadline:
        state = job_state(job_id)
        if state.state != "PENDING":
            return None
        if state.reason not in ("", "None"):  # the scheduler has looked at it
            return state.reason if state.reason in NEVER else None
        time.sleep(0.1)
    return None


def in_slurms_words(text: str) -> str:
    """Slurm's error lines, with this site's partitions where a partition or its size was the matter."""
    lines = [line for line in text.splitlines() if line.startswith("sbatch:")] or text.splitlines()
    message = "Slurm refused the job; nothing was submitted.\n  " + "\n  ".join(lines)
    if re.search("partition|node", text, re.IGNORECASE) and (names := partitions()):
        message += f"\n  Partitions here: {', '.join(names)}."
    if re.search("generic resource|gres|--gpus", text, re.IGNORECASE):
        message += "\n  For a site that takes --gres try cluster=gres; for one without GPUs, cluster=cpu."
    return message


def partitions() -> list[str]:
    """This site's partitions with their size; empty where sinfo does not answer."""
    try:
        listed = subprocess.run(
            ["sinfo", "-h", "-o", "%R (%D nodes)"], capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return sorted(set(listed.stdout.splitlines()))
