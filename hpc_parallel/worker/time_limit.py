"""How early a run must begin its last save, so that Slurm's time limit does not cut it off.

Slurm sends its signal `launcher.grace_s` before the limit. `grace_s` was chosen before any save was measured.
A save of a large model takes longer, so rank 0 compares the time left with the time that saves take.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hpc_parallel.slurm.jobs import job_fields, job_of, seconds_since_1970

MARGIN_S = 30.0  # to notice, to end all ranks, and to requeue
SAVES = 2  # one may be in progress, and the next one waits for it
_END = "SLURM_JOB_END_TIME"  # seconds since 1970; Slurm 23.02 and newer set it


@dataclass
class TimeLimit:
    """The end of this job by Slurm's clock, and the time that the run needs before it.

    end_s: the end of the job, as known when it began. current_end_s: asks Slurm, because an administrator may
    have moved the limit; None if Slurm does not answer. save_s: how long the newest save took; None before
    the first.
    """

    end_s: float
    current_end_s: Callable[[], float | None]
    save_s: Callable[[], float | None]
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._most_s = (self.end_s - self.clock()) / 2  # a short job keeps half of its time

    def is_near(self, *, step_s: float) -> bool:
        """Whether the run must save now; `step_s`: the time of a step, which delays the next check."""
        save_s = self.save_s()
        if save_s is None:
            return False
        needed_s = min(SAVES * (save_s + step_s) + MARGIN_S, self._most_s)
        if self.end_s - self.clock() > needed_s:
            return False
        self.end_s = self.current_end_s() or self.end_s
        left_s = self.end_s - self.clock()
        if left_s > needed_s:
            return False
        print(f"saving {left_s:.0f} s before the time limit, because a save takes {save_s:.0f} s", flush=True)
        return True


def time_limit_of(environment: Mapping[str, str], *, save_s: Callable[[], float | None]) -> TimeLimit | None:
    """The limit of the job that `environment` describes; None outside of a job or if its end is unknown."""
    job = job_of(environment)
    if job is None:
        return None

    def current_end_s() -> float | None:
        return seconds_since_1970((job_fields(job) or {}).get("EndTime"))

    text = environment.get(_END, "")
    end_s = float(text) if text.isdecimal() else current_end_s()
    return None if not end_s else TimeLimit(end_s=end_s, current_end_s=current_end_s, save_s=save_s)
