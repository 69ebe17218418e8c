"""Which launcher `launcher.kind=auto` means."""

from __future__ import annotations

from collections.abc import Mapping

from hpc_parallel.slurm import client


def choose_automatically(environment: Mapping[str, str]) -> tuple[str, str]:
    """Slurm where it answers and we are not inside an allocation, else this machine; with the reason."""
    if job := environment.get("SLURM_JOB_ID"):
        return "local", f"already inside the allocation of job {job}"
    if not client.is_installed():
        return "local", "there is no sbatch on this machine"
    if not client.answers():
        return "local", "sbatch is here, but Slurm's controller does not answer"
    return "slurm", "sbatch is here and Slurm's controller answers"
