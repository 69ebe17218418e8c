"""`python -m hpc_parallel.worker RUN_FOLDER`: one rank of a run, started by mpirun, srun or torchrun.

The rank, the host and the local rank come from the variables of the launcher. `launcher=script` makes the run
folder and prints where it is.
"""

from __future__ import annotations

import sys

from hpc_parallel.failure.rank_process import run

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m hpc_parallel.worker RUN_FOLDER")
    run(sys.argv[1])
