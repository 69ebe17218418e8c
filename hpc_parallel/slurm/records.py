"""Nodes, partitions and settings of a cluster, from what Slurm's commands print, as text or as JSON.

Text: `scontrol show config|partition|node`, whose keys are the same in Slurm 20.11 to 26.05. JSON:
`scontrol show partition|node --json` (from 23.02 on) and `sinfo --json` (from 21.08 on), whose keys changed
with Slurm 23.02.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpc_parallel.slurm.client import printed
from hpc_parallel.slurm.short_forms import gpus_of, minutes_of

_RECORD = re.compile(r"^(?=(?:NodeName|PartitionName)=)", re.MULTILINE)
_FIELD = re.compile(r"(?:^|\s)([A-Za-z][\w/]*)=(\S*)")
_SETTING = re.compile(r"^(\w+)\s+= ?(.*)$", re.MULTILINE)
_SHOW = (("show", "config"), ("--oneliner", "show", "partition"), ("--oneliner", "show", "node"))
_ACCOUNTING_S = 5.0  # how long a line of `check` may wait
_UNSET = 0xFFFFFFF0  # Slurm's NO_VAL and INFINITE lie above
_NO_NAMES = ("", "(null)", "ALL")
_UNSET_MB = 1  # RealMemory of nodes for which the site has set none


@dataclass(frozen=True)
class SlurmNode:
    """What jobs can get of a node.

    cpus: the CPUs, without those that the site keeps for the system. gpus: type -> count; the type is empty
    if the site does not name it. memory_mb: None if unknown. grouped: Slurm printed one row for several
    nodes; then the GPUs and the features are those of the first node, and CPUs and memory are the smallest of
    all.
    """

    name: str
    cpus: int
    memory_mb: int | None
    gpus: Mapping[str, int]
    partitions: Sequence[str]
    grouped: bool = False
    features: Sequence[str] = ()


@dataclass(frozen=True)
class Partition:
    """A partition.

    time_minutes, max_nodes: the limits of one job; None: no limit. nodes: the number of nodes in the
    partition. qos: the qualities of service that its jobs may use; empty: any.
    """

    name: str
    nodes: int
    time_minutes: int | None = None
    max_nodes: int | None = None
    default: bool = False
    up: bool = True
    qos: Sequence[str] = ()


@dataclass
class SlurmRecords:
    """The records from all outputs. settings: the lines of `scontrol show config`."""

    settings: dict[str, str] = field(default_factory=dict)
    partitions: dict[str, Partition] = field(default_factory=dict)
    nodes: dict[str, SlurmNode] = field(default_factory=dict)
    version: str | None = None
    cluster: str | None = None

    def nodes_of(self, partition: str) -> list[SlurmNode]:
        return [node for node in self.nodes.values() if partition in node.partitions]


def ask_records() -> SlurmRecords | None:
    """The records of this machine's Slurm; None if it does not answer."""
    texts = []
    for arguments in _SHOW:
        if (text := printed("scontrol", *arguments)) is None:
            return None
        texts.append(text)
    return read_records(filter(None, texts))


def accounts_of(user: str) -> list[str]:
    """The accounts of a user; empty on a site without accounting."""
    arguments = ("--noheader", "--parsable2", "show", "assoc", f"user={user}", "format=account")
    return list(dict.fromkeys((printed("sacctmgr", *arguments) or "").split()))


def has_accounting() -> bool:
    return printed("sacct", "-n", "-X", "-S", "now", patience_s=_ACCOUNTING_S) is not None


def release() -> str:
    """Slurm's name and version, as sbatch prints it."""
    return (printed("sbatch", "--version") or "").strip() or "slurm"


def max_array_size() -> int | None:
    """Slurm's MaxArraySize; None if it does not answer."""
    size = dict(_SETTING.findall(printed("scontrol", "show", "config") or "")).get("MaxArraySize", "")
    return int(size) if size.isdecimal() else None


def read_records(texts: Iterable[str]) -> SlurmRecords:
    """Join the outputs of several commands. Raises ValueError if a text is not such an output."""
    records = SlurmRecords()
    for text in texts:
        if text.lstrip().startswith("{"):
            _add_document(records, json.loads(text))
        else:
            _add_text(records, text)
    if not records.partitions:  # `sinfo --json` of Slurm before 23.02 lists nodes only
        counts = Counter(name for node in records.nodes.values() for name in node.partitions)
        records.partitions = {name: Partition(name, count) for name, count in counts.items()}
    return records


def _add_text(records: SlurmRecords, text: str) -> None:
    parts = _RECORD.split(text)
    count = 0
    for part in parts:
        fields: dict[str, str] = {}
        for name, value in _FIELD.findall(part):
            fields.setdefault(name, value)  # keep the first: Reason and Comment at the end are free text
        if "NodeName" in fields and "CPUTot" in fields:
            node = _text_node(fields)
            records.nodes[node.name] = node
            count += 1
        elif "PartitionName" in fields:
            partition = _text_partition(fields)
            records.partitions[partition.name] = partition
            count += 1
    if not count:
        settings = dict(_SETTING.findall(text))
        if "SLURM_VERSION" not in settings:
            raise ValueError("it is not the output of scontrol or sinfo")
        records.settings |= {name: value.strip() for name, value in settings.items()}
        records.version = records.settings["SLURM_VERSION"]
        records.cluster = records.settings.get("ClusterName", records.cluster)


def _text_node(fields: Mapping[str, str]) -> SlurmNode:
    return SlurmNode(
        fields["NodeName"], int(fields.get("CPUEfctv", fields["CPUTot"])),
        _memory(int(fields.get("RealMemory", 0)), int(fields.get("MemSpecLimit", 0))),
        gpus_of(fields.get("Gres", "")), _names(fields.get("Partitions")),
        features=_names(fields.get("ActiveFeatures")),
    )  # fmt: skip


def _text_partition(fields: Mapping[str, str]) -> Partition:
    most = fields.get("MaxNodes", "")
    return Partition(
        fields["PartitionName"],
        nodes=int(fields.get("TotalNodes", 0)),
        time_minutes=minutes_of(fields.get("MaxTime", "")),
        max_nodes=int(most) if most.isdecimal() else None,
        default=fields.get("Default") == "YES",
        up=fields.get("State", "UP") == "UP",
        qos=_names(fields.get("AllowQos")),
    )


def _add_document(records: SlurmRecords, document: Mapping[str, Any]) -> None:
    if not document.keys() & {"nodes", "partitions", "sinfo"}:
        raise ValueError("its JSON has neither nodes nor partitions")
    meta = document.get("meta", {})
    slurm = meta.get("slurm", meta.get("Slurm", {}))  # the key's case changed with 23.11
    records.version = slurm.get("release", records.version)
    records.cluster = slurm.get("cluster", records.cluster)
    for entry in document.get("nodes", []):
        node = _json_node(entry)
        records.nodes[node.name] = node
    for entry in document.get("partitions", []):
        partition = _json_partition(entry)
        records.partitions[partition.name] = partition
    for row in document.get("sinfo", []):
        _add_row(records, row)


def _json_node(entry: Mapping[str, Any]) -> SlurmNode:
    return SlurmNode(
        entry["name"], _number(entry.get("effective_cpus")) or int(entry["cpus"]),
        _memory(_number(entry.get("real_memory")), _number(entry.get("specialized_memory")) or 0),
        gpus_of(entry.get("gres") or ""), _names(entry.get("partitions")),
        features=_names(entry.get("active_features")),
    )  # fmt: skip


def _json_partition(entry: Mapping[str, Any]) -> Partition:
    if "maximums" in entry:  # Slurm 23.02 and newer
        most, nodes = entry["maximums"], entry.get("nodes", {})
        time, max_nodes, count = most.get("time"), most.get("nodes"), nodes.get("total")
        states = entry.get("partition", {}).get("state", ["UP"])
        qos = (entry.get("qos") or {}).get("allowed")
    else:
        time, max_nodes = entry.get("max_time_limit"), entry.get("maximum_nodes_per_job")
        count, states = entry.get("total_nodes"), [entry.get("state", "UP")]
        qos = entry.get("allowed_qos")
    flags = [str(flag).lower() for flag in entry.get("flags") or ()]
    return Partition(
        entry["name"],
        nodes=_number(count) or 0,
        time_minutes=_number(time),
        max_nodes=_number(max_nodes),
        default="default" in flags,
        up="UP" in states,
        qos=_names(qos),
    )


def _add_row(records: SlurmRecords, row: Mapping[str, Any]) -> None:
    """A row of `sinfo --json` (Slurm 23.02 and newer): nodes of one partition with equal use and state.

    These nodes may differ, because sinfo compares the GPUs in use, not the GPUs that a node has.
    """
    partition = _json_partition(row["partition"])
    records.partitions[partition.name] = partition
    gpus = gpus_of((row.get("gres") or {}).get("total") or "")
    features = _names((row.get("features") or {}).get("active"))
    kept = _number((row.get("resource_spec") or {}).get("memory")) or 0  # Slurm 24.11 and newer
    cpus, memory = _number(row["cpus"]["minimum"]) or 0, _memory(_number(row["memory"]["minimum"]), kept)
    for name in row["nodes"]["nodes"]:
        earlier = records.nodes.get(name)
        if earlier is None or earlier.grouped:
            partitions = (*(earlier.partitions if earlier else ()), partition.name)
            records.nodes[name] = SlurmNode(name, cpus, memory, gpus, partitions, True, features)


def _names(value: str | Sequence[str] | None) -> tuple[str, ...]:
    """The names of a list, or of a text with commas; empty if it means none or all."""
    names = value.split(",") if isinstance(value, str) else value or ()
    return tuple(name for name in names if name not in _NO_NAMES)


def _number(value: Any) -> int | None:
    """A number of Slurm's JSON; None if it is unset or infinite."""
    if isinstance(value, dict):
        return None if value.get("infinite") or not value.get("set") else _number(value.get("number"))
    return value if isinstance(value, int) and 0 <= value < _UNSET else None


def _memory(megabytes: int | None, kept: int = 0) -> int | None:
    """A node's memory for jobs, without the part that Slurm keeps for itself; None if unknown."""
    return megabytes - kept if megabytes is not None and megabytes > _UNSET_MB else None
