"""A first cluster profile, written from Slurm's records of nodes and partitions."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date

from hpc_parallel.slurm.records import Association, Partition, SlurmNode, SlurmRecords

_MOST_NAMES = 8  # the most names in one comment
_WIDTH = 44  # the width of a line before its comment
# Words that YAML does not read as text.
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "none"}
_OWN_SHARE = 0.95  # the share of a node's memory for jobs; Slurm and the system keep the rest


@dataclass(frozen=True)
class Login:
    """What the login shell adds: the user's associations, loaded modules, and the fabric's devices here."""

    associations: Sequence[Association] = ()
    modules: Sequence[str] = ()
    fabric: str = ""


def write_profile(records: SlurmRecords, *, name: str, login: Login, today: date) -> str:
    """The profile as YAML with comments.

    Raises ValueError if no partition that is up has a node.
    """
    chosen = choose(records)
    nodes = records.nodes_of(chosen.name)
    return "\n".join([
        f"# Slurm {records.version or 'of an unknown version'} on {today}, by init-cluster. Check each line.",
        *_identity(name, chosen, records, login),
        *_requests(chosen, nodes),
        *_partitions(records),
        *_gpus(chosen, nodes, records),
        *_many_runs(chosen, nodes, records, login),
        *_habits(records, login),
        "",
    ])  # fmt: skip


def choose(records: SlurmRecords) -> Partition:
    """The partition for jobs that name none: one with GPUs if there is any, otherwise the default one."""
    usable = [
        partition
        for partition in records.partitions.values()
        if partition.up and records.nodes_of(partition.name)
    ]
    if not usable:
        raise ValueError("no partition that is up has a node; it needs nodes and partitions")

    def order(partition: Partition) -> tuple[bool, bool, int]:
        has_gpus = any(node.gpus for node in records.nodes_of(partition.name))
        return has_gpus, partition.default, partition.nodes

    return max(usable, key=order)


def _identity(name: str, chosen: Partition, records: SlurmRecords, login: Login) -> Iterator[str]:
    yield f"name: {_text(name)}"
    yield _line(f"partition: {_text(chosen.name)}", "launcher.partition=... takes another one")
    accounts = [association.account for association in login.associations]
    if len(accounts) > 1:
        yield _line(f"account: {_text(accounts[0])}", f"yours are {', '.join(accounts)}")
    elif accounts:
        yield f"account: {_text(accounts[0])}"
    elif "associations" in records.settings.get("AccountingStorageEnforce", ""):
        yield _line("account: null", "the project that pays: this Slurm refuses jobs without a known one")
    else:
        yield _line("account: null", "the project that pays, if the site wants one")


def _requests(chosen: Partition, nodes: Sequence[SlurmNode]) -> Iterator[str]:
    """The QOS and the constraint, which a site may require, with the values of this partition."""
    if chosen.qos:
        yield _line("qos: null", f"{chosen.name} takes {_listed(chosen.qos)}")
    has_gpus = any(node.gpus for node in nodes)
    features = [set(node.features) for node in nodes if bool(node.gpus) == has_gpus]
    if any(features):
        common, every = set.intersection(*features), set.union(*features)
        texts = [f"all its nodes have {_listed(common)}"] * bool(common)
        texts += [f"some have {_listed(every - common)}"] * bool(every - common)
        yield _line("constraint: null", "; ".join(texts))


def _listed(names: Iterable[str]) -> str:
    first = sorted(names)
    more = f" and {len(first) - _MOST_NAMES} more" * (len(first) > _MOST_NAMES)
    return ", ".join(first[:_MOST_NAMES]) + more


def _partitions(records: SlurmRecords) -> Iterator[str]:
    yield _line("partitions:", "limits, to warn before a job is submitted")
    usable = [(part, nodes) for part in records.partitions.values() if (nodes := records.nodes_of(part.name))]
    has_gpus = any(node.gpus for partition, nodes in usable if partition.up for node in nodes)
    for partition, nodes in usable:
        if not partition.up:
            continue
        none = 0 if has_gpus and not any(node.gpus for node in nodes) else None
        count = min(partition.nodes or len(nodes), partition.max_nodes or partition.nodes or len(nodes))
        # What a node has of one type is no limit for jobs that take another one.
        gpus = (_only(_counts(nodes)) or none) if len(_types(nodes)) < 2 else None
        limits = {
            "nodes": count,
            "time_minutes": partition.time_minutes,
            "memory_gb": max((node.memory_mb or 0 for node in nodes), default=0) // 1024 or None,
            "gpus_per_node": gpus,
        }
        texts = [
            f"{key}: {value}"
            for key, value in limits.items()
            if value or (key == "gpus_per_node" and value == 0)
        ]
        yield f"  {_text(partition.name)}: {{{', '.join(texts)}}}"


def _gpus(chosen: Partition, nodes: Sequence[SlurmNode], records: SlurmRecords) -> Iterator[str]:
    types = _types(nodes)
    if not types:
        yield _line("gpus: false", "no node of these partitions has a GPU: each device is a process on CPUs")
        yield _line("cpus_per_device: 1", "CPU cores for each process")
        return
    if "cons_tres" in records.settings.get("SelectType", "cons_tres"):
        yield _line("gpu_flag: gpus-per-node", "gres: for --gres=gpu:N; none: whole nodes without a flag")
    else:
        yield _line("gpu_flag: gres", "this Slurm does not know --gpus-per-node")
    kind = _usual_type(nodes)
    devices = _only(_counts(nodes)) if len(types) == 1 else None
    every = {name: " or ".join(map(str, _counts(nodes, kind=name))) for name in sorted(types)}
    if len(types) > 1:
        listed = ", ".join(f"{counts} x {name or 'gpu'}" for name, counts in every.items())
        yield _line(f"gpu_type: {_text(kind)}", f"a job takes one type; nodes of {chosen.name} have {listed}")
        yield _line("gpus_per_node: null", "gpus_per_node=auto asks Slurm how many a node has of gpu_type")
    else:
        if kind:
            yield _line("gpu_type: null", f"{kind}, the only type in {chosen.name}")
        different = f"nodes have {every[kind]}: choose gpus_per_node for each run"
        yield _line(
            f"gpus_per_node: {devices or 'null'}", "gpus_per_node=auto takes all" if devices else different
        )
    yield from _shares([(node, sum(node.gpus.values())) for node in nodes if node.gpus])
    yield _line("device_memory_gb: null", "memory of one GPU: refuses models that can't fit")


def _types(nodes: Sequence[SlurmNode]) -> Counter[str]:
    """Type -> the GPUs of these nodes; slices of a GPU (MIG) are a type for each size."""
    return sum((Counter(node.gpus) for node in nodes), Counter())


def _usual_type(nodes: Sequence[SlurmNode]) -> str:
    """The type with the most GPUs in these nodes; empty if the site names no type, or without GPUs."""
    types = _types(nodes)
    return types.most_common(1)[0][0] if types else ""


def _counts(nodes: Sequence[SlurmNode], *, kind: str | None = None) -> list[int]:
    """The different counts per node of a GPU type (None: the usual one), ascending. A job uses one type."""
    kind = _usual_type(nodes) if kind is None else kind
    return sorted({node.gpus[kind] for node in nodes if kind in node.gpus})


def _shares(nodes: Sequence[tuple[SlurmNode, int]]) -> Iterator[str]:
    """The smallest number of cores and the smallest memory per GPU. nodes: each with its number of GPUs."""
    cpus = min(node.cpus // count for node, count in nodes)
    yield _line(f"cpus_per_device: {max(1, cpus)}", "a node's CPUs, often threads, shared by its GPUs")
    memory_mb = min((node.memory_mb or 0) / count for node, count in nodes)
    if gigabytes := int(_OWN_SHARE * memory_mb / 1024):
        yield _line(f"memory_gb_per_device: {gigabytes}", "95 % of a node's memory, shared by its GPUs")


def _many_runs(
    chosen: Partition, nodes: Sequence[SlurmNode], records: SlurmRecords, login: Login
) -> Iterator[str]:
    """How a sweep becomes jobs: arrays, or packed jobs where a job gets whole nodes of several devices."""
    devices = max(sum(node.gpus.values()) or node.cpus for node in nodes)
    account = next(iter(login.associations), Association(""))
    whole = chosen.whole_nodes and devices > 1
    texts = [f"a job of {chosen.name} gets whole nodes (OverSubscribe=EXCLUSIVE)"] * whole
    if account.running is not None:
        texts.append(f"{account.running} of your jobs run at a time (MaxJobs)")
    if account.submitted is not None:
        texts.append(f"you may have {account.submitted} jobs (MaxSubmitJobs)")
    size = records.settings.get("MaxArraySize")
    if size is not None and int(size) < 2:
        texts.append(f"there are no job arrays (MaxArraySize={size})")
    elif size is not None:
        yield f"max_array_size: {size}"
    if whole:
        yield _line("pack: auto", f"{'; '.join(texts)}: runs of a sweep share jobs")
    elif texts:
        yield _line("pack: off", f"{'; '.join(texts)}: auto lets runs of a sweep share jobs of whole nodes")


def _habits(records: SlurmRecords, login: Login) -> Iterator[str]:
    modules = f"[{', '.join(map(_text, login.modules))}]"
    yield _line(f"modules: {modules}", "loaded in the shell that wrote this file" if login.modules else "")
    fabric_note = f"here: {login.fabric}" if login.fabric else "each host is asked what it has"
    yield _line("fabric: auto", fabric_note)
    yield _line('master_suffix: ""', "what the fast network adds to host names, such as i or -ib")
    settings = records.settings
    if "JobRequeue" in settings:
        off = settings["JobRequeue"] == "0"
        habit = "requeues no job, so a run continues in a new one" if off else "requeues jobs itself"
        yield _line(f"resubmit: {str(off).lower()}", f"Slurm {habit} (JobRequeue={settings['JobRequeue']})")
    plugins = settings.get("TaskPlugin", "")
    if "affinity" in plugins:
        yield _line("srun: {cpu-bind: cores}", f"TaskPlugin={plugins}")
    storage = settings.get("AccountingStorageType")
    if storage is not None:
        state = "off" if storage in ("accounting_storage/none", "(null)", "") else "on"
        yield f"# Accounting is {state}: status finds this out by itself."
    yield _line("# scratch: $SLURM_TMPDIR", "a fast folder of each node, if jobs get one")


def _line(text: str, comment: str) -> str:
    return f"{text:<{_WIDTH}} # {comment}" if comment else text


def _text(value: str) -> str:
    """The value as YAML reads it back: in quotes if it could be a number, a boolean or more than a word."""
    plain = re.fullmatch(r"[A-Za-z_][A-Za-z0-9_./-]*", value) and value.lower() not in _WORDS
    return value if plain else json.dumps(value)


def _only(values: Iterable[int]) -> int | None:
    """The value, if all are equal and not zero."""
    different = set(values)
    return different.pop() or None if len(different) == 1 else None


def plain_name(cluster: str | None, *, taken: Mapping[str, object] | Sequence[str]) -> str:
    """A file name for a cluster. It is never the name of a profile that comes with this package."""
    name = re.sub(r"[^a-z0-9_-]", "_", (cluster or "").lower())
    return f"{name or 'my'}site" if not name or name in taken else name
