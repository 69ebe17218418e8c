"""What `auto` and null mean on the nodes of the run: launcher, devices, precision, cores and memory."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.problems import ConfigError, Problem
from hpc_parallel.slurm import client
from hpc_parallel.slurm.allocation import ALLOCATION, surroundings
from hpc_parallel.slurm.limits import NodeShare, gpu_counts, share_of_a_gpu

AUTO = "auto"
_PATIENCE_S = 10.0  # for nvidia-smi to answer
OF_GPUS, OF_CPUS = "bfloat16", "float32"


def devices_of_a_node(values: Mapping[str, Any]) -> int:
    """The number of devices for `gpus_per_node=auto`.

    A run on this machine uses the GPUs that are visible here, or one CPU process if there are none. A run on
    Slurm uses the number in the cluster profile (`cluster.partitions`, `cluster.gpus_per_node`). If the
    profile has none, the run uses the number that sinfo reports for the partition. In an allocation, the run
    uses the GPUs that the allocation has on each node.

    values: the keys `device`, `launcher` (`kind`, `partition`) and `cluster` (`name`, `partitions`, `gpus`,
    `gpu_type`, `gpus_per_node`) of the configuration.

    Raises ConfigError if the number is unknown.
    """
    launcher, cluster = values["launcher"], values["cluster"]
    if launcher["kind"] == "local":
        return 1 if values["device"] == "cpu" else max(1, visible_gpus(os.environ))
    if launcher["kind"] == ALLOCATION and (gpus := gpus_of_allocation(cluster)) is not None:
        return 1 if values["device"] == "cpu" else max(1, gpus)
    limits = cluster["partitions"].get(launcher["partition"])
    if isinstance(limits, dict) and isinstance(limits.get("gpus_per_node"), int):
        if not limits["gpus_per_node"] and cluster["gpus"]:
            rule = f"has no value here: nodes of partition {launcher['partition']} have no GPU"
            raise ConfigError([Problem("gpus_per_node", AUTO, rule, (1,), along=("cluster.gpus=false",))])
        return int(limits["gpus_per_node"]) or 1
    if cluster["gpus_per_node"] is not None:
        return int(cluster["gpus_per_node"])
    if not cluster["gpus"]:
        return 1
    partition, gpu_type = launcher["partition"], cluster["gpu_type"]
    counts = gpu_counts(partition=partition, gpu_type=gpu_type)
    if len(counts) == 1:
        return counts[0]
    where = f"partition {partition}" if partition else "the default partition"
    rule = f"has no value here: nodes of {where} have {' or '.join(map(str, counts))} GPUs"
    if not counts:
        unset = f"cluster={cluster['name']} does not set cluster.gpus_per_node"
        rule = f"has no value here: {unset}, and sinfo lists no GPUs in {where}"
    raise ConfigError([Problem("gpus_per_node", AUTO, rule, tuple(counts or [1]))])


def choose_launcher(kind: str) -> tuple[str, str]:
    """The launcher that `kind` means now, and the reason if `kind` is auto (else an empty text).

    `auto` is the allocation that we are inside, else Slurm if there is one, else this machine. A job in the
    environment that has ended is no allocation.
    """
    if kind != AUTO:
        return kind, ""
    allocation, reason, is_stale = surroundings(os.environ)
    if allocation is not None:
        return ALLOCATION, f"inside the allocation of job {allocation.job}"
    if not is_stale:
        return "local", reason
    stale = f"{reason}; " if os.environ.get("SLURM_JOB_ID") else ""
    if not client.is_installed():
        return "local", f"{stale}there is no sbatch on this machine"
    if (answers := client.answers()) is None:
        return "local", f"{stale}sbatch is here, but `scontrol ping` finds no configuration of Slurm"
    # A launch is refused while it does not answer: this may be a login node.
    does = "answers" if answers else "does not answer now"
    return "slurm", f"{stale}sbatch is here and Slurm's controller {does}"


def gpus_of_allocation(cluster: Mapping[str, Any]) -> int | None:
    """The GPUs that the allocation has on each node; None if Slurm does not count GPUs on this cluster.

    cluster: the keys `gpus` and `gpu_flag`.
    """
    allocation = surroundings(os.environ).allocation
    if allocation is None or not cluster["gpus"] or cluster["gpu_flag"] == "none":
        return None
    return allocation.gpus


def runs_on_cpus(config: RunConfig) -> bool:
    """Whether it is certain that no device will be a GPU."""
    is_job = config.launcher.kind != "local"
    return config.device == "cpu" or (is_job and not config.cluster.gpus)


def visible_gpus(environment: Mapping[str, str], *, asks: bool = True) -> int:
    """The NVIDIA GPUs that CUDA would show to a process here; asks: whether nvidia-smi may be started."""
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:  # CUDA stops at the first entry that names no device
        names = [name.strip() for name in listed.split(",")]
        return next((at for at, name in enumerate(names) if name in ("", "-1")), len(names))
    if asks and (output := ask("nvidia-smi", "-L")) is not None:
        return sum(line.startswith("GPU ") for line in output.splitlines())
    return sum(1 for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal())


def ask(*command: str, patience_s: float = _PATIENCE_S) -> str | None:
    """What a command prints; None if it is not there, fails or does not answer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=patience_s)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def default_precision(values: Mapping[str, Any], *, environment: Mapping[str, str] = os.environ) -> str:
    """`training.precision` if it is null. `values`: `device`, `launcher.kind` and `cluster.gpus`."""
    if values["device"] == "cpu":
        return OF_CPUS
    if values["device"] == "cuda":
        return OF_GPUS
    if values["launcher"]["kind"] == "local":
        return OF_GPUS if visible_gpus(environment, asks=False) else OF_CPUS
    return OF_GPUS if values["cluster"]["gpus"] else OF_CPUS


def default_share(values: Mapping[str, Any]) -> NodeShare:
    """`cluster.cpus_per_device` and `cluster.memory_gb_per_device` if they are null.

    values: as in `default_precision`, with `launcher.partition`, `cluster.gpu_type` and `flags`, the names of
    more flags. Returns one CPU and the memory of the partition if the run starts here or has no GPUs, or
    if sinfo does not say more. In an allocation, the CPUs are those of the allocation.
    """
    launcher, cluster = values["launcher"], values["cluster"]
    if launcher["kind"] == "local" or not cluster["gpus"] or values["device"] == "cpu":
        return NodeShare()
    if launcher["kind"] == ALLOCATION:
        allocation = surroundings(os.environ).allocation
        return NodeShare(1 if allocation is None else max(1, allocation.cpus // max(1, allocation.gpus)))
    share = share_of_a_gpu(partition=launcher["partition"], gpu_type=cluster["gpu_type"])
    asks_for_memory = any(str(flag).startswith("mem") for flag in values["flags"])
    return replace(share, memory_gb=None) if asks_for_memory else share  # Slurm takes only one such flag
