"""One cluster, in the forms in which Slurm 20.11 to 26.05 print it.

The forms are those of Slurm's source, compared for the last release of each version: src/api/node_info.c and
partition_info.c.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import date

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


def expected(*, cpus: int) -> dict[str, SlurmNode]:
    gpus = {"c1": {}, "g1": {"a100": 4}, "g2": {"a100": 4}}
    return {
        name: SlurmNode(name, cpus, memory - KEPT_MB, gpus[name], tuple(partitions), FEATURES[name])
        for name, (memory, _, partitions) in NODES.items()
    }


def plain(records: SlurmRecords) -> dict[str, SlurmNode]:
    return {name: replace(node, partitions=tuple(node.partitions)) for name, node in records.nodes.items()}


@pytest.mark.parametrize("version", VERSIONS)
def test_text(version: str) -> None:
    records = read_records(as_text(version))
    kept = KEPT_CPUS if since(version, "22.05") else 0
    assert plain(records) == expected(cpus=CPUS - kept)
    assert records.partitions == PARTITIONS
    assert (records.version, records.cluster) == (f"{version}.1", "mine")


def test_what_a_site_may_want_from_every_job() -> None:
    profile = write_profile(
        read_records(as_text("25.05")), name="mine", login=Login(), today=date(2026, 11, 25)
    )
    found = dict(line.split("#") for line in profile.splitlines() if line.startswith(("qos:", "constraint:")))
    assert {key.strip(): text.strip() for key, text in found.items()} == {
        "qos: null": "gpu takes gpu_debug, gpu_regular",
        "constraint: null": "all its nodes have a100; some have hbm40g, hbm80g",
    }
