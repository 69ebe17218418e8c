"""Follows a submitted job to its end: shows Slurm's state while it waits, and metrics while it runs."""

from __future__ import annotations

import os
import sys
import time

from hpc_parallel.exit_codes import DONE, FAILED
from hpc_parallel.failure.conclude_run import conclude
from hpc_parallel.launch.follow import RunFollower
from hpc_parallel.launch.prepare import PreparedRun
from hpc_parallel.record import owner
from hpc_parallel.record.names import command_on
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import read_tail
from hpc_parallel.record.summary_file import Summary, has_final_summary
from hpc_parallel.slurm.jobs import SILENT, UNKNOWN, Job, JobState, job_state

PERIOD_S = 0.3  # between two reads of the run folder
ASK_EVERY_S = 2.0  # between two queries to Slurm, whose controller serves many users
SUMMARY_S = 10.0  # time for a failed job's summary to appear on this host
COMPLETED_SUMMARY_S = 90.0  # the same for a completed job: an NFS client may cache for a minute


def wait_for_job(run: PreparedRun, job: Job) -> int:
    """Show the job's state and metrics until it ends; returns 0 if the run completed, else 1.

    Ctrl-C does not stop the job. It raises KeyboardInterrupt here, so that a sweep does not continue.
    """
    job_id = job.id
    follower = RunFollower(run.folder, steps=run.steps, is_script=run.is_script)
    try:
        state = _follow(follower, run.folder, job)
        deadline = time.monotonic() + summary_timeout_s(state.state)
        while _awaits_summary(run, job_id) and time.monotonic() < deadline:
            follower.poll()
            time.sleep(PERIOD_S)
    except KeyboardInterrupt:
        cancel = command_on(run.folder.path, "cancel")
        print(f"\nno longer following; job {job_id} continues ({cancel} ends it)", file=sys.stderr)
        raise
    if not owner.is_job(run.folder, job_id):
        print(f"job {job_id} {state}; the run has been resumed since: {run.folder.path}")
        summary = Summary.read(run.folder)  # the job may also have ended with code 0 to go on as another job
        return DONE if summary is not None and summary.completed else FAILED
    if not has_summary(run):
        conclude_job(run.folder, job_id, state)
    return follower.finish()


def summary_timeout_s(state: str) -> float:
    """How long to wait for the summary of a job that has ended in this Slurm state."""
    return COMPLETED_SUMMARY_S if state.upper() == "COMPLETED" else SUMMARY_S


def _follow(follower: RunFollower, folder: RunFolder, job: Job) -> JobState:
    """Poll until the job ends; returns its last state."""
    last_query_s = float("-inf")
    while True:
        if time.monotonic() - last_query_s >= ASK_EVERY_S:
            last_query_s = time.monotonic()
            state = job_state(job)
            follower.note(f"job {job.id} {state}")
            if has_ended(folder, state):
                return state
        follower.poll()
        time.sleep(PERIOD_S)


def has_ended(folder: RunFolder, state: JobState) -> bool:
    """Whether the job of a run has ended. If Slurm does not say so, the summary does.

    While Slurm is silent, only a completed run has: a failed one may be in the queue again.
    """
    if state.state == SILENT:
        summary = Summary.read(folder)
        return summary is not None and summary.completed
    return state.ended or (state.state == UNKNOWN and has_final_summary(folder))


def _awaits_summary(run: PreparedRun, job_id: str) -> bool:
    return owner.is_job(run.folder, job_id) and not has_summary(run)


def has_summary(run: PreparedRun) -> bool:
    """Whether `summary.json` exists. Lists the folder: an NFS client may cache that a name is missing."""
    return run.folder.summary.name in os.listdir(run.folder.path)


def conclude_job(folder: RunFolder, job_id: str, state: JobState) -> None:
    """Record how a job ended if it could not do so itself: cancelled in the queue, or its node lost.

    A run that has been resumed since is left alone, because it has not ended.
    """
    if not owner.is_job(folder, job_id):
        return
    logs = sorted(folder.slurm.glob(f"{job_id}*.out"))
    text = read_tail(logs[0]).decode(errors="replace") if logs else ""
    conclude(
        folder,
        returncode=0 if state.state == "COMPLETED" else 1,
        text=f"{text}\nSlurm says of job {job_id}: {state}",
        cancelled=True if state.state == "CANCELLED" else None,
        environment={"SLURM_JOB_ID": job_id},
    )
