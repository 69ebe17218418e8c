"""Following a submitted job to its end: Slurm's state while it waits, the run's own metrics while it runs."""

from __future__ import annotations

import sys
import time

from hpc_parallel.launch.follow import Follower
from hpc_parallel.launch.job_state import JobState, job_state
from hpc_parallel.launch.prepare import PreparedRun
from hpc_parallel.worker.conclude import conclude

PERIOD_S = 0.3  # between looks at the run folder
ASK_EVERY_S = 2.0  # a controller serves many users
WORDS_S = 5.0  # for the files of a job that has ended to show on this host


def wait_for_job(run: PreparedRun, job_id: str) -> int:
    """Show the job's state and metrics until it ends; returns 0 if the run completed, else 1.

    Ctrl-C ends the following, not the job.
    """
    follower = Follower(run.folder, steps=run.config.training.steps)
    try:
        state = _follow(follower, job_id)
    except KeyboardInterrupt:
        print(f"\nno longer following; job {job_id} goes on (scancel {job_id} ends it)", file=sys.stderr)
        return 1
    deadline = time.monotonic() + WORDS_S
    while not run.folder.summary.exists() and time.monotonic() < deadline:
        time.sleep(PERIOD_S)
    if not run.folder.summary.exists():
        _conclude(run, job_id, state)
    return follower.finish()


def _follow(follower: Follower, job_id: str) -> JobState | None:
    """The state in which the job ended; None where Slurm has forgotten it."""
    asked_s = float("-inf")
    known = False
    while True:
        if time.monotonic() - asked_s >= ASK_EVERY_S:
            asked_s = time.monotonic()
            state = job_state(job_id)
            if state is not None:
                known = True
                follower.note(f"job {job_id} {state}")
            if (state is not None and state.ended) or (state is None and known):
                return state
        follower.poll()
        time.sleep(PERIOD_S)


def _conclude(run: PreparedRun, job_id: str, state: JobState | None) -> None:
    """Say how a job ended that could not say so itself: cancelled in the queue, its node lost."""
    logs = sorted(run.folder.slurm.glob(f"{job_id}*.out"))
    text = logs[0].read_text(errors="replace") if logs else ""
    ended = f"Slurm says that job {job_id} {'is gone' if state is None else f'ended as {state}'}"
    cancelled = state is not None and state.state == "CANCELLED"
    conclude(run.folder, returncode=1, text=f"{text}\n{ended}", cancelled=cancelled or None)
