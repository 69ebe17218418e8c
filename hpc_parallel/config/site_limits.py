"""Warn of more nodes or memory than the partition or this machine has, before the run starts.

Slurm decides: `sbatch` refuses such a job, or queues one that never starts, as the site has set it. sinfo may
not show this user all nodes, so this is a warning and no refusal.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import lru_cache

from hpc_parallel.config.checks.memory_checks import GIB, least_bytes
from hpc_parallel.config.layout import layout_of, processes_per_node
from hpc_parallel.config.node_devices import ask, launcher_kind, period, visible_gpus
from hpc_parallel.config.schema import RunConfig

_KIND_OF_NODE = re.compile(r"^([^|\n]+)\|(\d+)\|(\d+)", re.MULTILINE)  # a plus may follow
_PATIENCE_S = 3.0  # with a controller that does not answer: the submission does not wait for it
_UNSET_MB = 1  # what Slurm shows of nodes whose memory the site has not configured


def site_warnings(config: RunConfig) -> list[str]:
    """One line for each resource of which no node, or no partition, has as much; empty if sinfo is silent."""
    launcher = config.launcher
    if launcher_kind(launcher.kind) == "local":
        return local_warnings(config, memory_bytes=physical_memory_bytes(), environment=os.environ)
    nodes, memory_mb = limits(_sinfo(period()), partition=launcher.partition)
    where = f"partition {launcher.partition}" if launcher.partition else "the default partition"
    warnings = []
    if 0 < nodes < config.nodes:
        plural = "s" * (nodes > 1)
        warnings.append(f"nodes={config.nodes}: {where} has {nodes} node{plural}. Try nodes={nodes}.")
    if launcher.memory_gb is not None and _UNSET_MB < memory_mb < 1024 * launcher.memory_gb:
        most_gb = memory_mb // 1024 or memory_mb / 1024
        key = f"launcher.memory_gb={launcher.memory_gb:g}"
        largest = f"the largest node of {where} has {memory_mb / 1024:.1f} GB"
        warnings.append(f"{key}: {largest}. Try launcher.memory_gb={most_gb:.3g}.")
    return [f"warning     {line}" for line in warnings]


def local_warnings(config: RunConfig, *, memory_bytes: int, environment: Mapping[str, str]) -> list[str]:
    """A line if the weights and what goes with them exceed the memory of this machine, without a GPU.

    Only our decoders are counted (`memory_checks.py`).
    """
    if config.device == "cuda" or (config.device == "auto" and visible_gpus(environment)):
        return []
    least = least_bytes(config, layout_of(config.strategy, devices=config.devices))
    per_node = processes_per_node(config.strategy, gpus_per_node=config.gpus_per_node)
    needed = (least or 0) * config.nodes * per_node
    if needed <= memory_bytes:
        return []
    return [
        f"warning     the processes of this run need at least {needed / GIB:.1f} GB together, and this "
        f"machine has {memory_bytes / GIB:.1f} GB. Try a smaller model or fewer processes."
    ]


def physical_memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def limits(listing: str, *, partition: str | None) -> tuple[int, int]:
    """The nodes of the largest of the partitions (None: the default one), and the memory in MB of a node.

    listing: lines `partition|nodes|memory` of sinfo, one for each kind of node. Returns zeros for a partition
    that is not listed.
    """
    nodes: dict[str, int] = {}
    memory_mb = 0
    for name, count, memory in _KIND_OF_NODE.findall(listing):
        if name.rstrip("*") in partition.split(",") if partition else name.endswith("*"):
            nodes[name] = nodes.get(name, 0) + int(count)
            memory_mb = max(memory_mb, int(memory))
    return max(nodes.values(), default=0), memory_mb


@lru_cache(maxsize=1)
def _sinfo(minute: int) -> str:
    return ask("sinfo", "-h", "-o", "%P|%D|%m", patience_s=_PATIENCE_S) or ""
