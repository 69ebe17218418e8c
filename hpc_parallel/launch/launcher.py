"""The interface of all launchers, and the launcher of a prepared run. All start the same `worker.main`."""

from __future__ import annotations

import threading
from pkgutil import resolve_name
from typing import Protocol

from hpc_parallel.launch.prepare import PreparedRun

LAUNCHERS = {  # by `launcher.kind`; only the one of the run is imported
    "local": "hpc_parallel.launch.local_launcher:LocalLauncher",
    "slurm": "hpc_parallel.launch.slurm_launcher:SlurmLauncher",
    "allocation": "hpc_parallel.launch.allocation_launcher:AllocationLauncher",
    "script": "hpc_parallel.launch.batch_script:ScriptLauncher",
}


class Launcher(Protocol):
    """Starts prepared runs in one place: this machine, an allocation, Slurm, or a script for the user."""

    def preview(self, run: PreparedRun) -> str:
        """Describe what would be started; start and write nothing."""

    def start(self, run: PreparedRun) -> threading.Thread | None:
        """Write the run folder and start or submit the run; print nothing and do not wait.

        Returns a thread that ends when the run ends, if this process started it; None if Slurm or the user
        starts it. Raises ConfigError if the run folder can't be made, and SiteRefusedError.
        """

    def launch(self, run: PreparedRun) -> int:
        """Do what `start` does, print what the user needs, and follow the run if that is requested.

        Returns the exit code. Raises ConfigError and SiteRefusedError.
        """


def launcher_of(run: PreparedRun) -> tuple[Launcher, str]:
    """The launcher of a run, and one line that names it and, for `launcher.kind=auto`, gives the reason."""
    kind, reason = run.config.launcher.kind, run.launcher_reason
    launcher: Launcher = resolve_name(LAUNCHERS[kind])()
    if kind == "allocation":
        from hpc_parallel.launch.allocation_launcher import place_of

        reason = place_of(run)
    return launcher, f"launcher {kind}" + (f": {reason}" if reason else "")
