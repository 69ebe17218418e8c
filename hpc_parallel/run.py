"""`python -m hpc_parallel.run`: the command `run` (commands/run_command.py)."""

# PYTHON_ARGCOMPLETE_OK (argcomplete's global completion finds the module by this line)
import os
import sys

from hpc_parallel.commands.run_command import main
from hpc_parallel.shell import run_command

if __name__ == "__main__":
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions
        from hpc_parallel.commands.completion import complete_run

        complete_run()
    sys.exit(run_command(main))
