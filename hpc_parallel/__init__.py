"""hpc_parallel: one command turns a configuration into a distributed training job on Slurm.

From Python: `hpc_parallel.submit(hpc_parallel.compose(["strategy=pipeline", "nodes=2"]))` (docs/python.md).
"""

import sys

from hpc_parallel.shadowing import guard_import_path

__version__ = "0.2.0"
__all__ = ["ConfigError", "Run", "RunConfig", "SiteRefusedError", "State", "compose", "runs", "submit"]

if sys.argv[:1] == ["-m"]:  # Python sets this while it looks for the module to run
    guard_import_path(__path__[0])
    _print_traceback = sys.excepthook

    def _unless_interrupted(kind, error, trace):  # type: ignore[no-untyped-def]  # types is not imported yet
        """Print no traceback for Ctrl-C while a command is still importing modules."""
        if kind is not KeyboardInterrupt:
            _print_traceback(kind, error, trace)

    sys.excepthook = _unless_interrupted

TYPE_CHECKING = False  # as in `typing`, which takes time to import
if TYPE_CHECKING:
    from hpc_parallel.api import ConfigError, Run, RunConfig, SiteRefusedError, State, compose, runs, submit
else:

    def __getattr__(name):
        """Import the Python interface when it is first used: commands and ranks do not need it."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from hpc_parallel import api

        globals().update({public_name: getattr(api, public_name) for public_name in __all__})
        return globals()[name]

    def __dir__():
        return sorted({*globals(), *__all__})
