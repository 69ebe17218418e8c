"""Which launcher takes a run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping

from hpc_parallel.launch.launcher import Launcher
from hpc_parallel.record.job_state import controller_answers


def choose(kind: str, *, environment: Mapping[str, str] = os.environ) -> tuple[Launcher, str]:
    """The launcher of this kind, and one line that says which and, for `auto`, why."""
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


def choose_automatically(environment: Mapping[str, str]) -> tuple[str, str]:
    """Slurm where it answers and we are not inside an allocation, else this machine; with the reason."""
    if job := environment.get("SLURM_JOB_ID"):
        return "local", f"already inside the allocation of job {job}"
    if shutil.which("sbatch") is None:
        return "local", "there is no sbatch on this machine"
    if not controller_answers(within_s=5):
        return "local", "sbatch is here, but Slurm's controller does not answer"
    return "slurm", "sbatch is here and Slurm's controller answers"
