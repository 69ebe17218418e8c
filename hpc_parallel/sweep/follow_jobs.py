"""`sweep.wait` on Slurm: all jobs of a sweep in one display until the last one has ended."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path

from hpc_parallel.exit_codes import DONE, FAILED
from hpc_parallel.launch.wait import ASK_EVERY_S, PERIOD_S, WORDS_S, conclude_job, has_summary
from hpc_parallel.record.job_state import states_by_accounting
from hpc_parallel.sweep.plan import PlannedRun, SweepPlan
from hpc_parallel.sweep.view import SweepView


def follow_jobs(plan: SweepPlan, jobs: Mapping[Path, str]) -> int:
    """Show the jobs' states and metrics; returns 0 if all runs completed, else 1.

    Ctrl-C ends the following, not the jobs.
    """
    going = {planned: jobs[planned.run.folder.path] for planned in plan.runs}
    ended_s: dict[PlannedRun, float] = {}  # jobs whose last words do not show on this host yet
    completed = True
    with SweepView(len(going)) as view:
        try:
            for planned, job in going.items():
                view.start(planned, f"job {job} submitted")
            while going:
                states = states_by_accounting(list(going.values()))
                for planned, job in list(going.items()):
                    view.poll(planned)
                    state = states[job]
                    if not state.ended:
                        view.note(planned, f"job {job} {state}")
                        continue
                    since_s = time.monotonic() - ended_s.setdefault(planned, time.monotonic())
                    if not has_summary(planned.run) and since_s < WORDS_S:
                        continue
                    if not has_summary(planned.run):
                        conclude_job(planned.run.folder, job, state)
                    completed = view.end(planned) and completed
                    del going[planned]
                _poll(view, going)
        except KeyboardInterrupt:
            print(f"\nno longer following; the jobs go on ({len(going)} have not ended)", file=sys.stderr)
            return FAILED
        view.say(view.last_word())
    return DONE if completed else FAILED


def _poll(view: SweepView, going: Mapping[PlannedRun, str]) -> None:
    """Between two looks at Slurm, which serves many users, only the run folders are looked at."""
    until_s = time.monotonic() + ASK_EVERY_S
    while going and time.monotonic() < until_s:
        for planned in going:
            view.poll(planned)
        time.sleep(PERIOD_S)
