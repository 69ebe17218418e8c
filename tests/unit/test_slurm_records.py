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
from hpc_parallel.slurm.short_forms import (
    MOST,
    expand_hosts,
    expand_numbers,
    expand_tasks,
    gpu_count,
    minutes_of,
)

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
        f"   RealMemory={memory} AllocMem=0 FreeMem=9 Sockets=2 Boards=1\n   CoreSpecCount={KEPT_CPUS} "
        f"CPUSpecList=0-{KEPT_CPUS - 1} MemSpecLimit={KEPT_MB}\n"
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


def expected() -> dict[str, SlurmNode]:
    gpus = {"c1": {}, "g1": {"a100": 4}, "g2": {"a100": 4}}
    return {
        name: SlurmNode(
            name, CPUS - KEPT_CPUS, memory - KEPT_MB, gpus[name], tuple(partitions), FEATURES[name]
        )
        for name, (memory, _, partitions) in NODES.items()
    }


def plain(records: SlurmRecords) -> dict[str, SlurmNode]:
    return {name: replace(node, partitions=tuple(node.partitions)) for name, node in records.nodes.items()}


@pytest.mark.parametrize("version", VERSIONS)
def test_text(version: str) -> None:
    records = read_records(as_text(version))
    assert plain(records) == expected()
    assert records.partitions == PARTITIONS
    assert (records.version, records.cluster) == (f"{version}.1", "mine")


@pytest.mark.parametrize(
    ("kept", "cpus", "threads", "jobs"),
    [
        ("CoreSpecCount=4", 64, 2, 56),
        ("CoreSpecCount=4", 32, 2, 28),  # the site counts cores
        ("CoreSpecCount=4 CPUSpecList=0-7", 64, 2, 56),  # the same cores twice
        ("CPUSpecList=0-1,32-37", 64, 2, 56),
        ("CPUSpecList=0,2,33,63", 64, 2, 56),  # one thread of each of four cores
        ("CPUSpecList=0,2", 32, 1, 30),
        ("MemSpecLimit=9", 64, 2, 64),
    ],
)
def test_cores_that_a_slurm_before_22_05_keeps(kept: str, cpus: int, threads: int, jobs: int) -> None:
    """Slurm keeps whole cores; a node of 32 cores has 64 CPUs if threads are counted."""
    text = (
        f"NodeName=n1 CoresPerSocket=16 CPUAlloc=0 CPUTot={cpus} Sockets=2 Boards=1 {kept} "
        f"ThreadsPerCore={threads} Partitions=a"
    )
    assert read_records([text]).nodes["n1"].cpus == jobs
    newer = text.replace("CPUTot", "CPUEfctv=50 CPUTot")
    assert read_records([newer]).nodes["n1"].cpus == 50


def test_what_a_site_may_want_from_every_job() -> None:
    profile = write_profile(
        read_records(as_text("25.05")), name="mine", login=Login(), today=date(2026, 11, 25)
    )
    found = dict(line.split("#") for line in profile.splitlines() if line.startswith(("qos:", "constraint:")))
    assert {key.strip(): text.strip() for key, text in found.items()} == {
        "qos: null": "gpu takes gpu_debug, gpu_regular",
        "constraint: null": "all its nodes have a100; some have hbm40g, hbm80g",
    }


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n[1-4,7]", ["n1", "n2", "n3", "n4", "n7"]),
        ("gpu-[008-010]-ib,login", ["gpu-008-ib", "gpu-009-ib", "gpu-010-ib", "login"]),
        ("r[1-2]n[09-10]", ["r1n09", "r1n10", "r2n09", "r2n10"]),
        ("a,b[3],c", ["a", "b3", "c"]),
        ("n[99-101]", ["n99", "n100", "n101"]),
        ("", []),
    ],
)
def test_node_lists(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == tuple(hosts)


def test_tasks_per_node() -> None:
    assert expand_tasks("2(x2),1") == (2, 2, 1)
    assert expand_tasks("4") == (4,)


def test_ranges_with_steps_and_zeros() -> None:
    assert expand_numbers("2,08-10,0-4:2") == ["2", "08", "09", "10", "0", "2", "4"]


@pytest.mark.parametrize(
    "text",
    [
        "0-99999999999",
        f"0-{MOST}",
        "1-9," * 200_000 + "1",
        "9" * 5000,
        "0-3:0",
        "",
        "-",
        "1-",
        "x",
        "1,,2",
        "²",
    ],
)
def test_no_list_or_too_long_a_list_of_numbers(text: str) -> None:
    with pytest.raises(ValueError, match=r"range|items|zero"):
        expand_numbers(text)


@pytest.mark.parametrize(
    "text", ["n[0-9999999]", "r" + "[1-1000000]" * 9, "n[0-600000],m[0-600000]", "n" * 9999 + "[0-9]", "n[]"]
)
def test_no_list_or_too_long_a_list_of_hosts(text: str) -> None:
    with pytest.raises(ValueError, match=r"range|items|longer"):
        expand_hosts(text)


@pytest.mark.parametrize("text", ["1(x99999999999)", "2(x", "", "1;2"])
def test_no_list_or_too_long_a_list_of_tasks(text: str) -> None:
    with pytest.raises(ValueError, match=r"range|items"):
        expand_tasks(text)


@pytest.mark.parametrize(
    ("gres", "gpu_type", "count"),
    [
        ("gpu:a100:4(S:0-1),gpu:1g.10gb:2", None, 6), ("gpu:a100:4(S:0,1),gpu:h100:2", "h100", 2),
        ("gpu:8", None, 8), ("gpu:a100=4", "a100", 4), ("gpu:8", "a100", 0), ("(null)", None, 0),
        ("shard:gpu:4,mps:100", None, 0),
    ],
)  # fmt: skip
def test_gpus_in_generic_resources(gres: str, gpu_type: str | None, count: int) -> None:
    assert gpu_count(gres, gpu_type=gpu_type) == count


@pytest.mark.parametrize("text", ["UNLIMITED", "infinite", "", "Partition_Limit", "1:2:3:4"])
def test_a_word_is_no_time(text: str) -> None:
    assert minutes_of(text) is None
