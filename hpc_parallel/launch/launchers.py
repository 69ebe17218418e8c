"""Which launcher takes a run, and what each offers. All of them start the same `worker.main`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Protocol

from hpc_parallel.launch.job_state import controller_answers
from hpc_parallel.launch.prepare import PreparedRun


class SiteRefusedError(RuntimeError):
    """Slurm said no; the message holds its own words."""


class Launcher(Protocol):
    def preview(self, run: PreparedRun) -> str:
        """What would be started, without starting or writing anything."""

    def launch(self, run: PreparedRun) -> int:
        """Write the run folder, start or submit the run; returns the exit code. Raises SiteRefusedError."""


def choose(kind: str, *, environment: Mapping[str, str] = os.environ) -> tuple[Launcher, str]:
    """The launcher of this kind, and one line that says which and, for `auto`, why."""
    reason = ""
    if kind == "auto":
        kind, reason = choose_automatically(environment)
    launcher: Launcher
    if kind == "local":
        from hpc_parallel.launch.local import LocalLauncher

        launcher = LocalLauncher()
    elif kind == "slurm":
        from hpc_parallel.launch.slurm import SlurmLauncher

        launcher = SlurmLauncher()
    else:
        from hpc_parallel.launch.batch_script import ScriptLauncher

        launcher = ScriptLauncher()
    return launcher, f"launcher {kind}" + (f": {reason}" if reason else "")


def choose_automatically(environment: Mapping[str, str]) -> tuple[str, str]:
    """Slurm where it answers and we are not inside an allocation, else this machine; with the reason."""
    if job := environment.get("SLURM_JOB_ID"):
        return "local", f"already inside the allocation of job {job}"
    if shutil.which("sbatch") is None:
        return "local", "there is no sbatch on this machine"
    if not controller_answers(within_s=5):
        return "local", "sbatch is here, but Slurm's controller does not answer"
    return "slurm", "sbatch is here and Slurm's controller answers"
