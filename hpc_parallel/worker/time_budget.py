"""The time that a task may take (`task.seconds`), by the clock of rank 0, so that all ranks decide alike."""

from __future__ import annotations

import time

from hpc_parallel.config.task_schema import JOB_SECONDS
from hpc_parallel.strategies import exchange


class TimeBudget:
    """Counts down from its construction. seconds: None in a configuration of an earlier version."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = JOB_SECONDS if seconds is None else seconds
        self._began_s = time.monotonic()

    @property
    def used_s(self) -> float:
        """Seconds since the construction, by this rank's clock."""
        return time.monotonic() - self._began_s

    def left_s(self, *, after_s: float = 0.0) -> float:
        """Seconds left after work that takes `after_s`. A collective call; returns the value of rank 0."""
        left_s: float = exchange.broadcast(self.seconds - self.used_s - after_s)
        return left_s


def advice(budget: TimeBudget, *, needed_s: float) -> str:
    """Why something was left out, and a budget that should suffice. needed_s: the time for the rest."""
    enough = rounded_up(budget.used_s + needed_s)
    return f"the time of task.seconds={budget.seconds:g} is used. Try task.seconds={enough}"


def rounded_up(seconds: float) -> int:
    """A round number that is 10 to 100 % more than `seconds`; at least 1."""
    step = 1
    while step * 10 <= seconds:
        step *= 10
    return int((1.1 * seconds) // step + 1) * step
