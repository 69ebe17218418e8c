"""Warn of more nodes or memory than the partition has, before the job is submitted.

Slurm decides: `sbatch` refuses such a job, or queues one that never starts, as the site has set it. sinfo may
not show this user all nodes, so this is a warning and no refusal.
"""

from __future__ import annotations

import re
from functools import lru_cache

from hpc_parallel.config.node_devices import ask, launcher_kind, period
from hpc_parallel.config.schema import RunConfig

_KIND_OF_NODE = re.compile(r"^([^|\n]+)\|(\d+)\|(\d+)", re.MULTILINE)  # a plus may follow
_PATIENCE_S = 3.0  # with a controller that does not answer: the submission does not wait for it
_UNSET_MB = 1  # what Slurm shows of nodes whose memory the site has not configured


def site_warnings(config: RunConfig) -> list[str]:
    """One line for each resource of which no node, or no partition, has as much; empty if sinfo is silent."""
    launcher = config.launcher
    if launcher_kind(launcher.kind) == "local":
        return []
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
