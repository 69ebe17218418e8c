"""One cluster, in the forms in which Slurm 20.11 to 26.05 print it.

The forms are those of Slurm's source, compared for the last release of each version: as text in
src/api/node_info.c and partition_info.c; as JSON in src/plugins/openapi/v0.0.37 and v0.0.38 (21.08, 22.05),
and from 23.02 on in the tables NODE, PARTITION_INFO and SINFO_DATA of src/plugins/data_parser.
"""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date
from typing import Any

import pytest

from hpc_parallel.site.profile import Login, write_profile
from hpc_parallel.slurm.records import Partition, SlurmNode, SlurmRecords, read_records

VERSIONS = ("20.11", "21.08", "22.05", "23.02", "23.11", "24.05", "24.11", "25.05", "25.11", "26.05")
CPUS, KEPT_CPUS, KEPT_MB = 128, 4, 10_000
NODES = {  # name -> memory in MiB, Gres, partitions
    "c1": (190_000, "", ["batch"]),
    "g1": (1_031_000, "gpu:a100:4(S:0-1),nvme:1", ["gpu", "short"]),
    "g2": (1_031_000, "gpu:a100:4(S:0-1),nvme:1", ["gpu", "short"]),
}
FEATURES = {"c1": (), "g1": ("a100", "hbm40g"), "g2": ("a100", "hbm80g")}
PARTITIONS = {
    "batch": Partition("batch", 1, 14 * 1440, None, default=True),
    "gpu": Partition("gpu", 2, 1440, 2, qos=("gpu_debug", "gpu_regular")),
    "short": Partition("short", 2, None, None, up=False),
}


def since(version: str, first: str) -> bool:
    return VERSIONS.index(version) >= VERSIONS.index(first)


def as_text(version: str) -> list[str]:
    """`scontrol show config`, `node` and `partition`."""
    efficient = f"CPUEfctv={CPUS - KEPT_CPUS} " if since(version, "22.05") else ""
    nodes = [
        f"NodeName={name} Arch=x86_64 CoresPerSocket=64 \n   {efficient}CPUTot={CPUS} CPULoad=0.1\n"
        f"   AvailableFeatures=more ActiveFeatures={','.join(FEATURES[name]) or '(null)'}\n"
        f"   Gres={gres or '(null)'}\n   NodeAddr={name} NodeHostName={name} Version={version}.1\n"
        f"   RealMemory={memory} AllocMem=0 FreeMem=9 Sockets=2 Boards=1\n   MemSpecLimit={KEPT_MB}\n"
        f"   State=IDLE ThreadsPerCore=1 TmpDisk=0 Weight=1\n   Partitions={','.join(partitions)} \n"
        for name, (memory, gres, partitions) in NODES.items()
    ]
    limits = {None: "UNLIMITED", 1440: "1-00:00:00", 14 * 1440: "14-00:00:00"}
    partitions = [
        f"PartitionName={part.name}\n   AllowGroups=ALL AllowQos={','.join(part.qos) or 'ALL'}\n"
        f"   AllocNodes=ALL Default={'YES' if part.default else 'NO'} QoS=N/A\n"
        f"   MaxNodes={part.max_nodes or 'UNLIMITED'} MaxTime={limits[part.time_minutes]} MinNodes=0\n"
        f"   Nodes=x OverTimeLimit=NONE PreemptMode=OFF\n"
        f"   State={'UP' if part.up else 'DOWN'} TotalCPUs=1 TotalNodes={part.nodes} JobDefaults=(null)\n"
        for part in PARTITIONS.values()
    ]
    config = f"Configuration data as of now\nClusterName = mine\nSLURM_VERSION           = {version}.1\n"
    return [config, "\n".join(nodes), "\n".join(partitions)]


def number(value: int | None) -> dict[str, Any]:
    """UINT32_NO_VAL of the data parsers."""
    return {"set": value is not None, "infinite": value is None, "number": value or 0}


def meta(version: str) -> dict[str, Any]:
    release = {"version": {"major": version}, "release": f"{version}.1"}
    return {"slurm": release | {"cluster": "mine"}} if since(version, "23.11") else {"Slurm": release}


def json_partition(part: Partition, version: str) -> dict[str, Any]:
    if not since(version, "23.02"):
        return {
            "name": part.name, "flags": ["default"] if part.default else [], "total_nodes": part.nodes,
            "max_time_limit": part.time_minutes or -1, "maximum_nodes_per_job": part.max_nodes or -1,
            "nodes": "x", "state": "UP" if part.up else "DOWN", "allowed_qos": ",".join(part.qos),
        }  # fmt: skip
    entry: dict[str, Any] = {
        "name": part.name, "nodes": {"configured": "x", "total": part.nodes},
        "maximums": {"nodes": number(part.max_nodes), "time": number(part.time_minutes)},
        "qos": {"allowed": ",".join(part.qos), "deny": "", "assigned": ""},
    }  # fmt: skip
    if since(version, "23.11"):
        entry["partition"] = {"state": ["UP" if part.up else "DOWN"]}
    if since(version, "26.05"):
        entry["flags"] = ["DEFAULT"] if part.default else []
    return entry


def json_node(name: str, version: str) -> dict[str, Any]:
    memory, gres, partitions = NODES[name]
    entry = {"name": name, "hostname": name, "cpus": CPUS, "real_memory": memory, "gres": gres,
             "partitions": partitions}  # fmt: skip
    listed = since(version, "23.02")
    entry["active_features"] = list(FEATURES[name]) if listed else ",".join(FEATURES[name])
    if listed:
        entry |= {"effective_cpus": CPUS - KEPT_CPUS, "specialized_memory": KEPT_MB}
    return entry


def as_json(version: str) -> list[str]:
    """`scontrol show node --json` and `partition --json`; before 23.02, from slurmrestd."""
    partitions = [json_partition(part, version) for part in PARTITIONS.values()]
    lists = {"nodes": [json_node(name, version) for name in NODES], "partitions": partitions}
    return [json.dumps({"meta": meta(version), key: value}) for key, value in lists.items()]


def row(version: str, partition: str, names: list[str], *, other_memory: int = 0) -> dict[str, Any]:
    """A row of `sinfo --json`. other_memory: of the smallest node, if nodes differ."""
    memory, gres, _ = NODES[names[0]]
    entry: dict[str, Any] = {
        "nodes": {"total": len(names), "nodes": names}, "node": {"state": ["IDLE"]},
        "cpus": {"total": CPUS * len(names), "minimum": CPUS, "maximum": CPUS},
        "memory": {"minimum": other_memory or memory, "maximum": memory, "allocated": 0},
        "gres": {"total": gres, "used": "gpu:a100:0(IDX:N/A)"},
        "features": {"total": "more", "active": ",".join(FEATURES[names[0]])},
        "partition": json_partition(PARTITIONS[partition], version),
    }  # fmt: skip
    return entry | ({"resource_spec": {"cpus": "", "memory": KEPT_MB}} if since(version, "24.11") else {})


def rows(version: str) -> str:
    """`sinfo --json` of Slurm 23.02 and newer."""
    listed = [
        row(version, "batch", ["c1"]),
        row(version, "gpu", ["g1", "g2"]),
        row(version, "short", ["g1", "g2"]),
    ]
    return json.dumps({"meta": meta(version), "sinfo": listed})


def expected(*, cpus: int, kept_mb: int, grouped: bool = False) -> dict[str, SlurmNode]:
    gpus = {"c1": {}, "g1": {"a100": 4}, "g2": {"a100": 4}}
    features = FEATURES | ({"g2": FEATURES["g1"]} if grouped else {})
    return {
        name: SlurmNode(name, cpus, memory - kept_mb, gpus[name], tuple(partitions), grouped, features[name])
        for name, (memory, _, partitions) in NODES.items()
    }


def shown(partitions: dict[str, Partition], *, version: str, in_json: bool) -> dict[str, Partition]:
    """The partitions, without what this version does not print as JSON."""
    has_default = not in_json or not since(version, "23.02") or since(version, "26.05")
    has_state = not in_json or version != "23.02"
    return {
        name: replace(part, default=part.default and has_default, up=part.up or not has_state)
        for name, part in partitions.items()
    }


def plain(records: SlurmRecords) -> dict[str, SlurmNode]:
    return {name: replace(node, partitions=tuple(node.partitions)) for name, node in records.nodes.items()}


@pytest.mark.parametrize("version", VERSIONS)
def test_text(version: str) -> None:
    records = read_records(as_text(version))
    kept = KEPT_CPUS if since(version, "22.05") else 0
    assert plain(records) == expected(cpus=CPUS - kept, kept_mb=KEPT_MB)
    assert records.partitions == PARTITIONS
    assert (records.version, records.cluster) == (f"{version}.1", "mine")


@pytest.mark.parametrize("version", VERSIONS[1:])
def test_json(version: str) -> None:
    records = read_records(as_json(version))
    kept = (KEPT_CPUS, KEPT_MB) if since(version, "23.02") else (0, 0)
    assert plain(records) == expected(cpus=CPUS - kept[0], kept_mb=kept[1])
    assert records.partitions == shown(PARTITIONS, version=version, in_json=True)
    assert records.version == f"{version}.1"


@pytest.mark.parametrize("version", [version for version in VERSIONS if since(version, "23.02")])
def test_rows_of_sinfo(version: str) -> None:
    records = read_records([rows(version)])
    kept = KEPT_MB if since(version, "24.11") else 0
    assert plain(records) == expected(cpus=CPUS, kept_mb=kept, grouped=True)
    assert records.partitions == shown(PARTITIONS, version=version, in_json=True)


def test_a_row_of_nodes_that_differ_gives_the_least_and_says_so() -> None:
    """sinfo joins idle nodes whatever GPUs they have, and prints the Gres of the first one."""
    document = json.dumps({"sinfo": [row("25.05", "gpu", ["g1", "g2"], other_memory=500_000)]})
    records = read_records([document])
    assert {node.memory_mb for node in records.nodes.values()} == {500_000 - KEPT_MB}
    profile = write_profile(records, name="mine", login=Login(), today=date(2026, 11, 25))
    assert profile.splitlines()[1:3] == [
        "# sinfo --json shows only the first node's GPUs of nodes in equal use. For all: --from "
        "the output of",
        "# scontrol show node.",
    ]


@pytest.mark.parametrize("exact_first", [True, False])
def test_what_is_known_of_each_node_goes_before_rows(exact_first: bool) -> None:
    _, nodes, partitions = as_text("25.05")
    texts = [nodes, partitions, rows("25.05")]
    records = read_records(texts if exact_first else texts[::-1])
    assert plain(records) == expected(cpus=CPUS - KEPT_CPUS, kept_mb=KEPT_MB)
    profile = write_profile(records, name="mine", login=Login(), today=date(2026, 11, 25))
    assert "sinfo" not in profile


def test_what_a_site_may_want_from_every_job() -> None:
    profile = write_profile(
        read_records(as_text("25.05")), name="mine", login=Login(), today=date(2026, 11, 25)
    )
    found = dict(line.split("#") for line in profile.splitlines() if line.startswith(("qos:", "constraint:")))
    assert {key.strip(): text.strip() for key, text in found.items()} == {
        "qos: null": "gpu takes gpu_debug, gpu_regular",
        "constraint: null": "all its nodes have a100; some have hbm40g, hbm80g",
    }
