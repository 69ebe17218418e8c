"""Chooses the launcher for a run."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hpc_parallel.config.launcher_kind import choose_automatically
from hpc_parallel.launch.launcher import Launcher


def choose(kind: str, *, environment: Mapping[str, str] = os.environ) -> tuple[Launcher, str]:
    """Return the launcher of this kind and one line that names it and, for `auto`, gives the reason."""
    reason = ""
    if kind == "auto":
        kind, reason = choose_automatically(environment)
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
