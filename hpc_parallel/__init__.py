"""hpc_parallel: one command turns a configuration into a distributed training job on Slurm."""

import sys

from hpc_parallel.shadowing import guard_import_path

__version__ = "0.1.0"

if sys.argv[:1] == ["-m"]:  # so it is while Python looks for the module to run
    guard_import_path(__path__[0])
    _print_traceback = sys.excepthook

    def _unless_interrupted(kind, error, trace):  # type: ignore[no-untyped-def]  # types is not imported yet
        """Ctrl-C while a command still imports is no error."""
        if kind is not KeyboardInterrupt:
            _print_traceback(kind, error, trace)

    sys.excepthook = _unless_interrupted
