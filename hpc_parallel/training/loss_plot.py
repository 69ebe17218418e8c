"""Have `plots/loss.png` drawn after a training, outside of this process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

from hpc_parallel.record.run_folder import RunFolder

MODULE = "hpc_parallel.report.run_plot"
SHORTEST = timedelta(seconds=10)  # matplotlib takes a second or two: a shorter training is not made to wait
PATIENCE_S = 20.0  # srun ends a rank that stays 60 s after the others


def draw_losses(folder: RunFolder, lines: Sequence[Mapping[str, Any]]) -> None:
    """Draw the losses of a training whose lines span SHORTEST; a failure does not affect the run.

    lines: of `metrics.jsonl`.
    """
    times = [datetime.fromisoformat(line["time"]) for line in lines]
    if len(times) < 2 or times[-1] - times[0] < SHORTEST:
        return
    command = [sys.executable, "-m", MODULE, str(folder.path)]
    with suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(command, stdin=subprocess.DEVNULL, timeout=PATIENCE_S, check=False)
