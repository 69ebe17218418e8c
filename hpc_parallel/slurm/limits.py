"""The limits of partitions: nodes, memory, time, GPUs and CPUs.

sinfo lists them, but may not show this user all nodes, and counts the CPUs and the memory that the site keeps
for the system. `scontrol show node` says what jobs can have.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from hpc_parallel.slurm.client import WhichSlurm, printed, which_slurm
from hpc_parallel.slurm.records import SlurmNode, read_records
from hpc_parallel.slurm.short_forms import expand_hosts, gpu_count, minutes_of

_FORMAT = "%P|%D|%m|%l|%G|%c|%N"
_PATIENCE_S = 5.0  # short, because the answer is only for a warning or a default
_KIND_OF_NODE = re.compile(
    r"^([^|\n]+)\|(\d+)\|(\d+)\+?\|?([^|\n]*)\|?([^|\n]*)\|?(\d*)\+?\|?([^|\n]*)", re.MULTILINE
)
_HOST = re.compile(r"^host=(\S+)\s*$", re.MULTILINE)
_UNSET_MB = 1  # Slurm shows this if the site has not configured the memory of a node


@dataclass(frozen=True)
class NodeKind:
    """Nodes of one partition that sinfo joins in one line, with the same CPUs and memory for jobs.

    If only sinfo tells these and the nodes differ, they are the smallest. time: the partition's limit, as
    Slurm writes it.
    """

    partition: str
    is_default: bool
    nodes: int
    memory_mb: int
    time: str
    gres: str
    cpus: int

    def is_in(self, partition: str | None) -> bool:
        """partition: one or more names, separated by commas; None: the default partition."""
        return self.partition in partition.split(",") if partition else self.is_default


@dataclass(frozen=True)
class Limits:
    """The largest values of a partition; None: unknown, or no limit.

    time_minutes: of a job. memory_mb, gpus_per_node, cpus: of a node.
    """

    nodes: int | None = None
    memory_mb: float | None = None
    time_minutes: int | None = None
    gpus_per_node: int | None = None
    cpus: int | None = None


@dataclass(frozen=True)
class NodeShare:
    """The share of a node that one device may use. memory_gb: None if the partition's default applies."""

    cpus: int = 1
    memory_gb: float | None = None


def limits(*, partition: str | None, gpus: bool = True, gpu_type: str | None = None) -> Limits:
    """The limits of a partition (None: the default one), or the largest of several.

    gpus: whether the job requests GPUs. gpu_type: count only GPUs of this type.
    """
    listed = list(node_kinds())
    kinds = [kind for kind in listed if kind.is_in(partition)]
    memory_mb = max((kind.memory_mb for kind in kinds), default=0)
    minutes = [minutes_of(kind.time) for kind in kinds]
    # If sinfo lists no GPU in any partition, the site does not count GPUs, so there is no limit.
    lists_gpus = any(gpu_count(kind.gres, gpu_type=gpu_type) for kind in listed)
    most_gpus = max((gpu_count(kind.gres, gpu_type=gpu_type) for kind in kinds), default=None)
    return Limits(
        nodes=max(_nodes_by_partition(kinds).values(), default=None),
        memory_mb=memory_mb if memory_mb > _UNSET_MB else None,
        time_minutes=None if None in minutes else max(filter(None, minutes), default=None),
        gpus_per_node=most_gpus if gpus and lists_gpus else None,
        cpus=max((kind.cpus for kind in kinds), default=0) or None,
    )


def gpu_counts(*, partition: str | None, gpu_type: str | None) -> list[int]:
    """The different counts of GPUs that the nodes of a partition (None: the default one) have, ascending."""
    kinds = (kind for kind in node_kinds() if kind.is_in(partition))
    return sorted({gpu_count(kind.gres, gpu_type=gpu_type) for kind in kinds} - {0})


def share_of_a_gpu(*, partition: str | None, gpu_type: str | None) -> NodeShare:
    """The smallest share of CPUs and memory of a GPU in the partition's nodes.

    A tenth of the memory stays with the system: a job that asks for all of it may never start.
    """
    shares = []
    for kind in node_kinds():
        count = gpu_count(kind.gres, gpu_type=gpu_type)
        if count and kind.cpus and kind.is_in(partition):
            shares.append((kind.cpus // count, kind.memory_mb * 9 // 10 // count // 1024))
    if not shares:
        return NodeShare()
    cpus, memory_gb = (min(column) for column in zip(*shares, strict=True))
    return NodeShare(max(1, cpus), float(memory_gb) if memory_gb else None)


def partitions() -> list[str]:
    """This site's partitions with their sizes; empty if sinfo does not answer."""
    sizes = _nodes_by_partition(list(node_kinds()))
    return sorted(f"{name} ({count} node{'s' * (count > 1)})" for name, count in sizes.items())


def hosts_of(partition: str) -> set[str]:
    """All hosts of one or more partitions, those that are down too; empty if sinfo does not answer."""
    listing = printed("sinfo", "-h", "-N", "-o", "host=%N", "-p", partition) or ""
    return set(_HOST.findall(listing))  # a site may print other lines


def _nodes_by_partition(kinds: list[NodeKind]) -> dict[str, int]:
    nodes: dict[str, int] = {}
    for kind in kinds:
        nodes[kind.partition] = nodes.get(kind.partition, 0) + kind.nodes
    return nodes


def node_kinds() -> Iterator[NodeKind]:
    """The lines of sinfo, in parts by what scontrol says of their nodes; Slurm is asked once a minute."""
    for name, count, memory, time, gres, cpus, hosts in _KIND_OF_NODE.findall(_sinfo(which_slurm())):
        of_sinfo = (int(cpus or 0), int(memory))
        kinds = Counter((node.cpus, node.memory_mb or of_sinfo[1]) for node in _nodes_named(hosts))
        kinds[of_sinfo] += max(0, int(count) - kinds.total())  # the nodes that scontrol does not show
        for (usable, memory_mb), nodes in kinds.items():
            if nodes:
                is_default = name.endswith("*")
                yield NodeKind(name.rstrip("*"), is_default, nodes, memory_mb, time, gres, usable)


def _nodes_named(hosts: str) -> list[SlurmNode]:
    """What Slurm says of each of these nodes; empty if it does not answer."""
    try:
        names = expand_hosts(hosts)
    except ValueError:
        return []
    nodes = _nodes(which_slurm()) if names else {}
    return [nodes[name] for name in names if name in nodes]


@lru_cache(maxsize=1)
def _sinfo(which: WhichSlurm) -> str:
    return printed("sinfo", "-h", "-o", _FORMAT, patience_s=_PATIENCE_S) or ""


@lru_cache(maxsize=1)
def _nodes(which: WhichSlurm) -> dict[str, SlurmNode]:
    text = printed("scontrol", "--oneliner", "show", "node", patience_s=_PATIENCE_S)
    try:
        return read_records(filter(None, [text])).nodes
    except ValueError:  # of an answer without nodes
        return {}
