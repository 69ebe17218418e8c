"""What every launcher offers. All of them start the same `worker.main`."""

from __future__ import annotations

import threading
from typing import Protocol

from hpc_parallel.launch.prepare import PreparedRun


class SiteRefusedError(RuntimeError):
    """Slurm said no; the message holds its own words."""


class Launcher(Protocol):
    def preview(self, run: PreparedRun) -> str:
        """What would be started, without starting or writing anything."""

    def start(self, run: PreparedRun) -> threading.Thread | None:
        """Write the run folder, and start or submit the run; print nothing and do not wait.

        Returns the thread that ends with a run of this machine; None if the run is Slurm's or the user's.
        Raises ConfigError if the run folder can't be made, and SiteRefusedError.
        """

    def launch(self, run: PreparedRun) -> int:
        """The same for the command: print what the user needs, follow the run where that is asked for.

        Returns the exit code. Raises ConfigError and SiteRefusedError.
        """
