"""The content of `environment.json`, which makes a run comparable and repeatable."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hpc_parallel.record.provenance import installed_packages

SLURM_KEYS = (
    "SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_PARTITION", "SLURM_JOB_ACCOUNT", "SLURM_JOB_NODELIST",
    "SLURM_JOB_NUM_NODES", "SLURM_NTASKS", "SLURM_CPUS_PER_TASK", "SLURM_RESTART_COUNT", "SLURM_CLUSTER_NAME",
    "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID",
)  # fmt: skip


def describe(
    *,
    ranks: Sequence[Any],
    variables: Mapping[str, str],
    environment: Mapping[str, str],
    device: torch.device,
) -> dict[str, Any]:
    """Returns packages, versions, the host and device of each rank, the Slurm job, and fabric variables."""
    cuda = device.type == "cuda"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "tf32": tf32() if cuda else None,
        "device": torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine(),
        "ranks": list(ranks),
        "slurm": {key: environment[key] for key in SLURM_KEYS if key in environment},
        "fabric": dict(variables),
        "packages": installed_packages(),
    }


def tf32() -> dict[str, bool]:
    """Whether float32 products of matrices and of convolutions are rounded to TF32's 11 bits."""
    return {
        "matmul": torch.backends.cuda.matmul.allow_tf32,
        "convolution": torch.backends.cudnn.allow_tf32,
    }
