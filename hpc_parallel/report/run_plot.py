"""Draw the plots of one run into its `plots/`: `python -m hpc_parallel.report.run_plot RUN_FOLDER`.

Rank 0 starts this module in a separate process at the end of the run (worker/run_plots.py). Without
matplotlib it draws nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_bytes
from hpc_parallel.report import collective_curves, machines, plots
from hpc_parallel.report.gather import gather


def main(arguments: Sequence[str]) -> None:
    """Draw the plots of the run folder, which is the only argument."""
    (path,) = arguments
    if find_spec("matplotlib") is not None:
        draw(RunFolder(Path(path)))


def draw(folder: RunFolder) -> None:
    """Write the plots of the run's losses (if it logged at least two), its collectives and its links."""
    from hpc_parallel.report import drawing

    rows = gather([folder.path]).rows
    for pictures in (plots.losses, collective_curves.pictures, machines.pictures):
        for picture in pictures(rows):
            folder.plots.mkdir(mode=0o700, exist_ok=True)
            write_bytes(folder.plots / f"{picture.name}.png", drawing.draw(picture).png)


if __name__ == "__main__":
    main(sys.argv[1:])
