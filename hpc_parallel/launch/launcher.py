"""The interface of all launchers. Every launcher starts the same `worker.main`."""

from __future__ import annotations

import threading
from typing import Protocol

from hpc_parallel.launch.prepare import PreparedRun


class Launcher(Protocol):
    """Starts prepared runs in one place: this machine, Slurm, or a script for the user."""

    def preview(self, run: PreparedRun) -> str:
        """Describe what would be started; start and write nothing."""

    def start(self, run: PreparedRun) -> threading.Thread | None:
        """Write the run folder and start or submit the run; print nothing and do not wait.

        Returns a thread that ends when the run ends, if the run is on this machine; None if Slurm or the user
        starts it. Raises ConfigError if the run folder can't be made, and SiteRefusedError.
        """

    def launch(self, run: PreparedRun) -> int:
        """Do what `start` does, print what the user needs, and follow the run if that is requested.

        Returns the exit code. Raises ConfigError and SiteRefusedError.
        """
