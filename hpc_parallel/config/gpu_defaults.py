"""Defaults for GPUs: bfloat16, and a device's share of the cores and the memory of a node."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hpc_parallel.config.node_devices import launcher_kind, sees_gpus
from hpc_parallel.slurm.limits import NodeShare, share_of_a_gpu

OF_GPUS, OF_CPUS = "bfloat16", "float32"


def default_precision(values: Mapping[str, Any], *, environment: Mapping[str, str] = os.environ) -> str:
    """`training.precision` if it is null. `values`: `device`, `launcher.kind` and `cluster.gpus`."""
    if values["device"] == "cpu":
        return OF_CPUS
    if values["device"] == "cuda":
        return OF_GPUS
    if launcher_kind(values["launcher"]["kind"], environment=environment) == "local":
        return OF_GPUS if sees_gpus(environment) else OF_CPUS
    return OF_GPUS if values["cluster"]["gpus"] else OF_CPUS


def default_share(values: Mapping[str, Any], *, environment: Mapping[str, str] = os.environ) -> NodeShare:
    """`cluster.cpus_per_device` and `cluster.memory_gb_per_device` if they are null.

    values: as in `default_precision`, with `launcher.partition`, `cluster.gpu_type` and `flags`, the names of
    more flags. Returns one CPU and the memory of the partition if the run starts here or has no GPUs, or
    if sinfo does not say more.
    """
    launcher, cluster = values["launcher"], values["cluster"]
    is_job = launcher_kind(launcher["kind"], environment=environment) != "local"
    if not is_job or not cluster["gpus"] or values["device"] == "cpu":
        return NodeShare()
    share = share_of_a_gpu(partition=launcher["partition"], gpu_type=cluster["gpu_type"])
    asks_for_memory = any(str(flag).startswith("mem") for flag in values["flags"])
    return replace(share, memory_gb=None) if asks_for_memory else share  # Slurm takes only one such flag
