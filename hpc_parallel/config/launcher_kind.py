"""Which launcher `launcher.kind` means."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hpc_parallel.slurm import client

AUTO = "auto"


def launcher_kind(kind: str, *, environment: Mapping[str, str] = os.environ) -> str:
    """The launcher that `kind` means now: local, slurm or script."""
    return choose_launcher(kind, environment=environment)[0]


def choose_launcher(kind: str, *, environment: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """The launcher that `kind` means now, and the reason if `kind` is auto (else an empty text)."""
    return choose_automatically(environment) if kind == AUTO else (kind, "")


def choose_automatically(environment: Mapping[str, str]) -> tuple[str, str]:
    """Slurm where it answers and we are not inside an allocation, else this machine; with the reason."""
    if job := environment.get("SLURM_JOB_ID"):
        return "local", f"already inside the allocation of job {job}"
    if not client.is_installed():
        return "local", "there is no sbatch on this machine"
    if not client.answers():
        return "local", "sbatch is here, but Slurm's controller does not answer"
    return "slurm", "sbatch is here and Slurm's controller answers"
