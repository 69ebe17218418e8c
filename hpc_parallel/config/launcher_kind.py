"""Which launcher `launcher.kind=auto` means."""

from __future__ import annotations

import shutil
from collections.abc import Mapping

from hpc_parallel.record.job_state import controller_answers


def choose_automatically(environment: Mapping[str, str]) -> tuple[str, str]:
    """Slurm where it answers and we are not inside an allocation, else this machine; with the reason."""
    if job := environment.get("SLURM_JOB_ID"):
        return "local", f"already inside the allocation of job {job}"
    if shutil.which("sbatch") is None:
        return "local", "there is no sbatch on this machine"
    if not controller_answers(within_s=5):
        return "local", "sbatch is here, but Slurm's controller does not answer"
    return "slurm", "sbatch is here and Slurm's controller answers"
