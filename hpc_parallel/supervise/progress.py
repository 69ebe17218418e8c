"""The progress of a rank: the trainer marks it, a watchdog in another thread reads it."""

from __future__ import annotations

import time
from dataclasses import dataclass

# In the order of one step, so that comparing (step, phase) shows which of two ranks is behind.
PHASES = ("start", "data", "step", "log", "validate", "save", "done")
READER = "read ahead"  # the name of the thread that reads the next batch (training/read_ahead.py)
WAITS_FOR_REQUEST = "_read_requested"  # the innermost function of that thread while it reads nothing


@dataclass
class Progress:
    """The last mark of one rank; it works without a reader.

    A mark replaces one tuple by another in 0.1 us, so a reader never sees a partial mark.
    """

    first_step: int = 1  # of this process: it may take longer because it compiles
    latest: tuple[float, str, int] = (0.0, "start", 0)  # time.monotonic(), phase, step

    def mark(self, phase: str, step: int) -> None:
        """Record that `phase` (one of PHASES) begins or has completed a part."""
        self.latest = (time.monotonic(), phase, step)
