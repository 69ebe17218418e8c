"""`python -m hpc_parallel.run`: the command `run` (commands/run.py)."""

import sys

from hpc_parallel.commands.run import main
from hpc_parallel.shell import run_command

if __name__ == "__main__":
    sys.exit(run_command(main))
