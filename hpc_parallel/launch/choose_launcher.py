"""The launcher of a prepared run."""

from __future__ import annotations

from hpc_parallel.launch.launcher import Launcher
from hpc_parallel.launch.prepare import PreparedRun


def launcher_of(run: PreparedRun) -> tuple[Launcher, str]:
    """The launcher of a run, and one line that names it and, for `launcher.kind=auto`, gives the reason."""
    kind, reason = run.config.launcher.kind, run.launcher_reason
    launcher: Launcher
    if kind == "local":
        from hpc_parallel.launch.local_launcher import LocalLauncher

        launcher = LocalLauncher()
    elif kind == "slurm":
        from hpc_parallel.launch.slurm_launcher import SlurmLauncher

        launcher = SlurmLauncher()
    else:
        from hpc_parallel.launch.batch_script import ScriptLauncher

        launcher = ScriptLauncher()
    return launcher, f"launcher {kind}" + (f": {reason}" if reason else "")
