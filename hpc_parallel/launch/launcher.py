"""What every launcher offers. All of them start the same `worker.main`."""

from __future__ import annotations

from typing import Protocol

from hpc_parallel.launch.prepare import PreparedRun


class SiteRefusedError(RuntimeError):
    """Slurm said no; the message holds its own words."""


class Launcher(Protocol):
    def preview(self, run: PreparedRun) -> str:
        """What would be started, without starting or writing anything."""

    def launch(self, run: PreparedRun) -> int:
        """Write the run folder, start or submit the run; returns the exit code. Raises SiteRefusedError."""
