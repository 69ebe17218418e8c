"""The phases of a rank, which its watchdog reports, and the thread that reads the next batch."""

from __future__ import annotations

# In the order of one step, so that comparing (step, phase) shows which of two ranks is behind.
PHASES = ("start", "data", "step", "log", "validate", "save", "done")
READER = "read ahead"  # the name of the thread that reads the next batch (training/read_ahead.py)
WAITS_FOR_REQUEST = "_read_requested"  # the innermost function of that thread while it reads nothing
