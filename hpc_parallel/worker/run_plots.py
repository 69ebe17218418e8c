"""Starts the process that draws the plots of a run at its end (report/run_plot.py)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from hpc_parallel.record.run_folder import RunFolder, note_phase

MODULE = "hpc_parallel.report.run_plot"
SHORTEST_S = 10.0  # matplotlib takes a second or two, which is too long for a shorter run
PATIENCE_S = 20.0  # a plot must not hold the devices of the job


def draw_plots(folder: RunFolder, *, lasted_s: float) -> None:
    """Draw the plots of a run that lasted at least SHORTEST_S; a failure does not affect the run."""
    if lasted_s < SHORTEST_S:
        return
    note_phase(folder, "drawing the plots")
    command = [sys.executable, "-m", MODULE, str(folder.path)]
    with suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(command, stdin=subprocess.DEVNULL, timeout=PATIENCE_S, check=False)


def span_s(lines: Sequence[Mapping[str, Any]]) -> float:
    """The seconds between the first and the last line of `metrics.jsonl`."""
    times = [datetime.fromisoformat(line["time"]) for line in lines]
    return (times[-1] - times[0]).total_seconds() if times else 0.0
