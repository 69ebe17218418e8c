"""Nodes, partitions and settings of a cluster, from what Slurm's commands print.

The keys of `scontrol show config|partition|node` are the same in Slurm 20.11 to 26.05, but for `Exclusive`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hpc_parallel.slurm.client import printed
from hpc_parallel.slurm.short_forms import expand_numbers, gpus_of, minutes_of

_RECORD = re.compile(r"^(?=(?:NodeName|PartitionName)=)", re.MULTILINE)
_FIELD = re.compile(r"(?:^|\s)([A-Za-z][\w/]*)=(\S*)")
_SETTING = re.compile(r"^(\w+)\s+= ?(.*)$", re.MULTILINE)
_SHOW = (("show", "config"), ("--oneliner", "show", "partition"), ("--oneliner", "show", "node"))
_ACCOUNTING_S = 5.0  # how long a line of `check` may wait
# `-D`: also the starts before a requeue. Some versions print NO_VAL64 for an unknown value.
_ENERGY, _NO_VALUE = ("sacct", "-D", "-X", "-n", "-P", "-o", "ConsumedEnergyRaw", "-j"), 2**63
_RELEASE = re.compile(r"^slurm\S* \d\S*", re.MULTILINE)
_NO_NAMES = ("", "(null)", "ALL")
_WHOLE_NODES = {"EXCLUSIVE", "NODE", "TOPO"}  # OverSubscribe=EXCLUSIVE is Exclusive=NODE or TOPO in 26.05
_UNSET_MB = 1  # RealMemory of nodes for which the site has set none


@dataclass(frozen=True)
class SlurmNode:
    """What jobs can get of a node.

    cpus: the CPUs, without those that the site keeps for the system. gpus: type -> count; the type is empty
    if the site does not name it. memory_mb: None if unknown.
    """

    name: str
    cpus: int
    memory_mb: int | None
    gpus: Mapping[str, int]
    partitions: Sequence[str]
    features: Sequence[str] = ()


@dataclass(frozen=True)
class Partition:
    """A partition.

    time_minutes, max_nodes: the limits of one job; None: no limit. nodes: the number of nodes in the
    partition. qos: the qualities of service that its jobs may use; empty: any. whole_nodes: a job gets all
    of its nodes, whatever it asks for.
    """

    name: str
    nodes: int
    time_minutes: int | None = None
    max_nodes: int | None = None
    default: bool = False
    up: bool = True
    qos: Sequence[str] = ()
    whole_nodes: bool = False


@dataclass(frozen=True)
class Association:
    """What a user may do with an account.

    running: the most jobs that run at a time. submitted: the most that wait or run. None: no limit.
    """

    account: str
    running: int | None = None
    submitted: int | None = None


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


def associations_of(user: str) -> list[Association]:
    """The first association of a user with each account; empty on a site without accounting.

    sacctmgr also shows the limits that an association has from its account (sacctmgr(1), WOLimits).
    """
    columns = "format=user,account,maxjobs,maxsubmitjobs"
    arguments = ("--noheader", "--parsable2", "show", "assoc", f"user={user}", columns)
    rows = [line.split("|") for line in (printed("sacctmgr", *arguments) or "").splitlines()]
    by_account: dict[str, Association] = {}
    for row in rows:
        if len(row) == 4 and row[0] == user:
            by_account.setdefault(row[1], Association(row[1], _number(row[2]), _number(row[3])))
    return list(by_account.values())


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def consumed_joules(jobs: Sequence[str]) -> float | None:
    """The energy of jobs with all their starts, from accounting; None if it does not know one of them."""
    text = printed(*_ENERGY, ",".join(jobs), patience_s=_ACCOUNTING_S)
    values = [line.strip() for line in (text or "").splitlines()]
    joules = [float(value) for value in values if value.isdecimal() and 0 < int(value) < _NO_VALUE]
    return sum(joules) if len(joules) == len(values) > 0 else None


def has_accounting() -> bool:
    return printed("sacct", "-n", "-X", "-S", "now", patience_s=_ACCOUNTING_S) is not None


def release() -> str:
    """Slurm's name and version, as sbatch prints it, perhaps among lines of the site."""
    return next(iter(_RELEASE.findall(printed("sbatch", "--version") or "")), "slurm")


def max_array_size() -> int | None:
    """Slurm's MaxArraySize; None if it does not answer."""
    settings = dict(_SETTING.findall(printed("scontrol", "show", "config") or ""))
    return _number(settings.get("MaxArraySize", ""))


def read_records(texts: Iterable[str]) -> SlurmRecords:
    """Join the outputs of several commands. Raises ValueError if a text is not such an output."""
    records = SlurmRecords()
    for text in texts:
        _add_text(records, text)
    if not records.partitions:  # only nodes were given
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
            raise ValueError("it is not the output of scontrol as text")
        records.settings |= {name: value.strip() for name, value in settings.items()}
        records.version = records.settings["SLURM_VERSION"]
        records.cluster = records.settings.get("ClusterName", records.cluster)


def _text_node(fields: Mapping[str, str]) -> SlurmNode:
    return SlurmNode(
        fields["NodeName"], _cpus(fields),
        _memory(int(fields.get("RealMemory", 0)), int(fields.get("MemSpecLimit", 0))),
        gpus_of(fields.get("Gres", "")), _names(fields.get("Partitions")),
        _names(fields.get("ActiveFeatures")),
    )  # fmt: skip


def _cpus(fields: Mapping[str, str]) -> int:
    """The CPUs for jobs. Slurm says so itself since 22.05; older ones name the cores that they keep.

    A CPU is a thread, or a core if the site counts cores. The ids of a `CPUSpecList` go from core to core,
    and Slurm keeps all CPUs of a core of which it names one (slurm.conf(5), CpuSpecList).
    """
    if "CPUEfctv" in fields:
        return int(fields["CPUEfctv"])
    cpus = int(fields["CPUTot"])
    cores = int(fields.get("Sockets", 0)) * int(fields.get("CoresPerSocket", 0))
    cpus_per_core = max(1, cpus // cores if cores else int(fields.get("ThreadsPerCore", 1)))
    listed = expand_numbers(fields["CPUSpecList"]) if fields.get("CPUSpecList") else []
    named = {int(cpu) // cpus_per_core for cpu in listed}
    return cpus - cpus_per_core * max(int(fields.get("CoreSpecCount", 0)), len(named))


def _text_partition(fields: Mapping[str, str]) -> Partition:
    return Partition(
        fields["PartitionName"],
        nodes=int(fields.get("TotalNodes", 0)),
        time_minutes=minutes_of(fields.get("MaxTime", "")),
        max_nodes=_number(fields.get("MaxNodes", "")),
        default=fields.get("Default") == "YES",
        up=fields.get("State", "UP") == "UP",
        qos=_names(fields.get("AllowQos")),
        whole_nodes=not _WHOLE_NODES.isdisjoint({fields.get("OverSubscribe"), fields.get("Exclusive")}),
    )


def _names(value: str | None) -> tuple[str, ...]:
    """The names of a text with commas; empty if it means none or all."""
    return tuple(name for name in (value or "").split(",") if name not in _NO_NAMES)


def _memory(megabytes: int, kept: int) -> int | None:
    """A node's memory for jobs, without the part that Slurm keeps for itself; None if unknown."""
    return megabytes - kept if megabytes > _UNSET_MB else None
