"""Where a rank stands: the trainer marks it, a watchdog in another thread reads it."""

from __future__ import annotations

import time
from dataclasses import dataclass

# In the order of one step, so that (step, phase) tells which of two ranks is behind.
PHASES = ("start", "data", "step", "log", "validate", "save", "done")


@dataclass
class Progress:
    """The last mark of one rank. Nobody need watch it.

    A mark is one tuple put in the place of another, 0.1 us: the reader never sees half of one.
    """

    first_step: int = 1  # of this process: what a first step compiles and connects takes its time
    now: tuple[float, str, int] = (0.0, "start", 0)  # time.monotonic(), phase, step

    def mark(self, phase: str, step: int) -> None:
        """`phase` of PHASES begins, or goes on after some part of it is done."""
        self.now = (time.monotonic(), phase, step)
