"""hpc_parallel: one command turns a configuration into a distributed training job on Slurm."""

import sys

from hpc_parallel.shadowing import refuse_shadowed_modules

__version__ = "0.1.0"

if sys.argv[:1] == ["-m"]:  # so it is while Python looks for the module to run
    refuse_shadowed_modules()
    # Ctrl-C while a command still imports: no traceback.
    sys.excepthook = lambda kind, *rest: kind is KeyboardInterrupt or sys.__excepthook__(kind, *rest)
