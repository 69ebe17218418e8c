"""Draw `plots/loss.png` of one run: `python -m hpc_parallel.report.run_plot RUN_FOLDER`.

Rank 0 starts this module as a process of its own after the last step (training/loss_plot.py). Without
matplotlib it draws nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_bytes
from hpc_parallel.report.gather import gather


def main(arguments: Sequence[str]) -> None:
    """Draw the losses of the run folder that is the only argument."""
    (path,) = arguments
    if find_spec("matplotlib") is not None:
        draw(RunFolder(Path(path)))


def draw(folder: RunFolder) -> None:
    """Write the plot of the run's losses; nothing if it logged fewer than two."""
    from hpc_parallel.report.plots import loss_plots

    for plot in loss_plots(gather([folder.path]).rows):
        folder.loss_plot.parent.mkdir(mode=0o700, exist_ok=True)
        write_bytes(folder.loss_plot, plot.png)


if __name__ == "__main__":
    main(sys.argv[1:])
