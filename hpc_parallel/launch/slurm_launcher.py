"""Submits through submitit: one srun task for each rank, with the run folder's path as the only payload."""

from __future__ import annotations

import shlex
from typing import Any

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
from hpc_parallel.launch.prepare import PreparedRun
from hpc_parallel.record import owner
from hpc_parallel.record.names import command_on
from hpc_parallel.record.safe_write import write_text
from hpc_parallel.slurm.jobs import Job, never_starting
from hpc_parallel.slurm.submit import (
    SiteRefusedError,
    dry_submit,
    refusal_message,
    require_sbatch,
    submit_script,
    withdraw,
)
from hpc_parallel.slurm.submitit_executor import Executor
from hpc_parallel.terminal import warn

REASON_S = 5.0  # time for the scheduler to examine a job that may be refused


class SlurmLauncher:
    """Submits the job, and follows it if `launcher.wait` is true."""

    def preview(self, run: PreparedRun) -> str:
        return render(run) if needs_own_script(run) else executor(run).script

    def start(self, run: PreparedRun) -> None:
        self._submit(run)

    def launch(self, run: PreparedRun) -> int:
        job = self._submit(run)
        path = run.folder.path
        print(f"job         {job.id}")
        print(f"run folder  {path}")
        print(f"follow      {command_on(path, 'logs', '--follow')}")
        print(f"cancel      {command_on(path, 'cancel')}", flush=True)
        if reason := owner.elsewhere(owner.Owner.read(run.folder)):
            warn(f"job {job.id}: {reason}")
        if not run.config.launcher.wait:
            return DONE
        from hpc_parallel.launch.wait import wait_for_job

        return wait_for_job(run, job)

    def _submit(self, run: PreparedRun) -> Job:
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


def submit(run: PreparedRun) -> Job:
    """Submit the run. Raises SiteRefusedError with Slurm's message."""
    run.folder.slurm.mkdir(mode=0o700, exist_ok=run.resumes)
    submitter = None if needs_own_script(run) else executor(run)
    script = submitter.script if submitter is not None else render(run)
    require_sbatch()
    trial = dry_submit(script)
    if submitter is not None:
        job, script = submitter.submit_call(job_entry.rank, str(run.folder.path))
    else:
        write_text(run.folder.batch_script, script)
        job = submit_script(run.folder.batch_script)
    try:
        refused = never_starting([job], within_s=REASON_S) if trial.returncode != 0 else {}
        if job in refused:
            raise SiteRefusedError(refusal_message(f"{trial.stderr.strip()} ({refused[job]})"))
        owner.hand_to_job(run.folder, job)
        write_text(run.folder.resubmission, render(run))
        write_text(run.folder.batch_script, script)
    except BaseException:  # a full disk, Ctrl-C
        withdraw([job])
        raise
    return job
