"""Submits through submitit: one srun task for each rank, with the run folder's path as the only payload."""

from __future__ import annotations

from dataclasses import replace

from hpc_parallel import job as job_entry
from hpc_parallel.exit_codes import DONE
from hpc_parallel.launch.batch_script import needs_own_script, render
from hpc_parallel.launch.prepare import PreparedRun
from hpc_parallel.launch.run_files import written
from hpc_parallel.record import owner
from hpc_parallel.record.names import command_on
from hpc_parallel.record.safe_write import write_text
from hpc_parallel.slurm.client import answers
from hpc_parallel.slurm.jobs import Job, never_starting
from hpc_parallel.slurm.submit import (
    SiteRefusedError,
    dry_submit,
    refusal_message,
    require_sbatch,
    submit_script,
    withdraw,
)
from hpc_parallel.terminal import warn

REASON_S = 5.0  # time for the scheduler to examine a job that may be refused


class SlurmLauncher:
    """Submits the job, and follows it if `launcher.wait` is true."""

    def preview(self, run: PreparedRun) -> str:
        return render(run, payload=not needs_own_script(run))

    def start(self, run: PreparedRun) -> None:
        with written(run):
            submit(run)

    def launch(self, run: PreparedRun) -> int:
        with written(run):
            job = submit(run)
        path = run.folder.path
        print(f"job         {job.id}")
        print(f"run folder  {path}")
        print(f"follow      {command_on(path, 'logs', '--follow')}")
        print(f"cancel      {command_on(path, 'cancel')}", flush=True)
        if reason := owner.elsewhere(owner.Owner.read(run.folder)):
            warn(f"job {job.id}: {reason}")
        if not run.config.launcher.wait:
            return DONE
        from hpc_parallel.launch.follow import wait_for_job

        return wait_for_job(run, job)


def submit(run: PreparedRun) -> Job:
    """Submit the run. Raises SiteRefusedError with Slurm's message."""
    run.folder.slurm.mkdir(mode=0o700, exist_ok=run.resumes)
    script = SlurmLauncher().preview(run)
    require_sbatch()
    if run.launcher_reason and answers() is False:  # of launcher=auto; sbatch would wait for a minute
        raise SiteRefusedError(
            "Slurm's controller does not answer now (`scontrol ping`), and nothing was started: try again "
            "later; launcher=local runs here"
        )
    trial = dry_submit(script)
    if needs_own_script(run):
        write_text(run.folder.batch_script, script)
        job = submit_script(run.folder.batch_script)
    else:
        from hpc_parallel.slurm.submitit_executor import Executor

        executor = Executor(run.folder.slurm, script=script, time_minutes=run.config.launcher.time_minutes)
        job = executor.submit_call(job_entry.rank, str(run.folder.path))
    try:
        refused = never_starting([job], within_s=REASON_S) if trial.returncode != 0 else {}
        if job in refused:
            raise SiteRefusedError(refusal_message(f"{trial.stderr.strip()} ({refused[job]})"))
        owner.hand_to_job(run.folder, job)
        write_text(run.folder.resubmission, render(replace(run, dependency="")))
        write_text(run.folder.batch_script, script)
    except BaseException:  # a full disk, Ctrl-C
        withdraw([job])
        raise
    return job
