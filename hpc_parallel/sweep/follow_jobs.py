"""`sweep.wait` on Slurm: show all jobs of a sweep in one display until the last one has ended."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path

from hpc_parallel.exit_codes import DONE, FAILED
from hpc_parallel.launch.wait import (
    ASK_EVERY_S,
    PERIOD_S,
    conclude_job,
    has_ended,
    has_summary,
    summary_timeout_s,
)
from hpc_parallel.slurm.jobs import Job, job_states
from hpc_parallel.sweep.next_steps import after_the_end
from hpc_parallel.sweep.sweep_plan import PlannedRun, SweepPlan
from hpc_parallel.sweep.view import SweepView


def follow_jobs(plan: SweepPlan, jobs: Mapping[Path, Job]) -> int:
    """Show the jobs' states and metrics. Returns 0 if all runs completed, else 1.

    Ctrl-C ends the display, not the jobs.
    """
    active = {planned: jobs[planned.run.folder.path] for planned in plan.runs}
    ended_s: dict[PlannedRun, float] = {}  # jobs whose summary is not visible on this host yet
    completed = True
    with SweepView(len(active)) as view:
        try:
            for planned, job in active.items():
                view.start(planned, f"job {job.id} submitted")
            while active:
                states = job_states(active.values())
                for planned, job in list(active.items()):
                    view.poll(planned)
                    state = states[job]
                    if not has_ended(planned.run.folder, state):
                        view.note(planned, f"job {job.id} {state}")
                        continue
                    since_s = time.monotonic() - ended_s.setdefault(planned, time.monotonic())
                    if not has_summary(planned.run) and since_s < summary_timeout_s(state.state):
                        continue
                    if not has_summary(planned.run):
                        conclude_job(planned.run.folder, job.id, state)
                    completed = view.end(planned) and completed
                    del active[planned]
                _poll(view, active)
        except KeyboardInterrupt:
            print(f"\nno longer following; the jobs go on ({len(active)} have not ended)", file=sys.stderr)
            return FAILED
        for line in (view.counts(), *after_the_end(plan.folder, completed=completed)):
            view.say(line)
    return DONE if completed else FAILED


def _poll(view: SweepView, active: Mapping[PlannedRun, Job]) -> None:
    """Read only the run folders between two queries to Slurm, which serves many users."""
    until_s = time.monotonic() + ASK_EVERY_S
    while active and time.monotonic() < until_s:
        for planned in active:
            view.poll(planned)
        time.sleep(PERIOD_S)
