"""Which host the checks at a start accuse, and of what; nobody is accused without a reason."""

from __future__ import annotations

import json
import os
import platform
import re
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from hpc_parallel.config.site_schema import PreflightConfig
from hpc_parallel.failure import failure
from hpc_parallel.failure.conclude_run import after_failure, conclude
from hpc_parallel.failure.restart import (
    END,
    MOST_EXCLUSIONS,
    REQUEUE,
    RestartLimits,
    decide,
    hosts_to_exclude,
)
from hpc_parallel.layout.layout import Layout
from hpc_parallel.machine import host_facts
from hpc_parallel.machine.host_facts import cpu_facts, different_packages, disk, driver_version
from hpc_parallel.machine.host_findings import Finding, findings
from hpc_parallel.machine.world import World
from hpc_parallel.machine.xids import XidEvents
from hpc_parallel.record import attempts
from hpc_parallel.record.recorded_preflight import difference_table
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.report.run_lines import difference_lines
from hpc_parallel.start import start_checks
from hpc_parallel.start.start_checks import PreflightError, act_on, warn
from hpc_parallel.start.transport import FabricError
from hpc_parallel.strategies.exchange import FollowerError
from hpc_parallel.worker import main

GIB = 2**30
HEALTHY_GPU = {"uncorrected_errors": 0, "throttled": [], "bad_rows": False, "foreign": []}


def facts(number: int) -> dict[str, Any]:
    """A healthy host; figures differ between hosts as measured ones do."""
    noise = Random(number).uniform
    return {
        "versions": {"torch": "2.13.0", "nccl": "2.27.7", "driver": "570.86", "packages": "aa"},
        "disks": {
            "run": {"folder": "/runs", "cache": False, "free_bytes": 50 * GIB, "write_s": 0.1,
                    "write_bytes_per_s": 1e8 * noise(0.5, 2)},
        },
        "cpu": {"model": "EPYC 7763", "cores": 128, "total_bytes": 512 * GIB,
                "available_bytes": 512 * GIB * noise(0.06, 1)},
        "gpus": [dict(HEALTHY_GPU)] * 2,
        "devices": [{"name": "H100", "total_bytes": 80 * GIB, "used_bytes": 0.6 * GIB}] * 2,
        "matrix_s": [0.010 * noise(0.8, 1.2) for _ in range(2)],
        "time_s": 1000.0 + noise(-0.5, 0.5),
        "time_tolerance_s": 0.01,
    }  # fmt: skip


def hosts(count: int = 4) -> dict[str, dict[str, Any]]:
    return {f"n{number}": facts(number) for number in range(1, count + 1)}


def told(cluster: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    return [(finding.host, finding.what) for finding in findings(cluster)]


@pytest.mark.parametrize("count", [1, 2, 3, 8, 100])
def test_nobody_is_accused_in_healthy_clusters(count: int) -> None:
    assert told(hosts(count)) == []


@pytest.mark.parametrize(
    ("ids", "lines"),
    [
        (("GPU-a", "GPU-b", "GPU-c"), ["n1: device 2: a matrix product takes 20.0 ms, and 11.0 elsewhere"]),
        (("GPU-a", "GPU-b", "GPU-b"), []),  # two processes share a GPU
        ((None, None, None), []),  # processes on CPUs share cores
    ],
)
def test_a_slow_gpu_of_a_single_host(ids: tuple[str | None, ...], lines: list[str]) -> None:
    cluster = hosts(1)
    cluster["n1"]["devices"] = [
        {"name": "H100", "total_bytes": 80 * GIB, "used_bytes": 0, "uuid": uuid} for uuid in ids
    ]
    cluster["n1"]["matrix_s"] = [0.010, 0.011, 0.020]
    assert [finding.line for finding in findings(cluster)] == lines


@pytest.mark.parametrize(
    ("device", "hosts_of_ranks", "compared"),
    [("cpu", ["n1"] * 4, False), ("cpu", ["n1", "n2"], True), ("cuda", ["n1"], False),
     ("cuda", ["n1", "n1"], True)],
)  # fmt: skip
def test_products_are_timed_where_devices_can_be_compared(
    device: str, hosts_of_ranks: list[str], compared: bool
) -> None:
    """However many nodes a machine simulates, its processes share its cores."""
    ranks = [{"host": host} for host in hosts_of_ranks]
    assert start_checks.can_compare(ranks, torch.device(device)) == compared
    assert told({"n1": {**facts(1), "matrix_s": []}}) == []  # nothing is said where nothing is timed


@pytest.mark.parametrize(
    ("path", "value", "what"),
    [
        (("versions", "torch"), "2.11.0", "torch 2.11.0, and 2.13.0 elsewhere"),
        (("versions", "driver"), None, "driver missing, and 570.86 elsewhere"),
        (("devices",), [{"name": "A100", "total_bytes": 80 * GIB, "used_bytes": 0}] * 2,
         "devices 2 x A100, and 2 x H100 elsewhere"),
        (("devices", 1), {"name": "H100", "total_bytes": 80 * GIB, "used_bytes": 20 * GIB},
         "device 1: 21.5 of 85.9 GB are used by other processes"),
        (("gpus", 0), {**HEALTHY_GPU, "uncorrected_errors": 3},
         "GPU 0: 3 memory errors that ECC could not correct"),
        (("gpus", 1), {**HEALTHY_GPU, "throttled": ["too hot"]}, "GPU 1: low clocks (too hot)"),
        (("gpus", 1), {**HEALTHY_GPU, "bad_rows": True},
         "GPU 1: rows of its memory wait for a reset or can't be replaced"),
        (("gpus", 1), {**HEALTHY_GPU, "foreign": [77]}, "GPU 1: used by other processes (77)"),
        (("disks", "run"), {"folder": "/runs", "cache": False, "error": "No space left on device"},
         "run folder /runs: No space left on device"),
        (("cpu",), {"model": "EPYC 7763", "cores": 1, "total_bytes": 100e9, "available_bytes": 4.9e9},
         "only 4.9 of 100.0 GB of its memory are free"),
        (("disks", "run", "free_bytes"), 2e8, "run folder /runs: 0.20 GB free"),
        (("matrix_s",), [0.01, 0.03], "a matrix product takes 30.0 ms, and 10.0 elsewhere"),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("count", "bad"), [(2, 1), (2, 2), (3, 1), (3, 3), (8, 1), (8, 8)])
def test_the_host_is_named(path: tuple[Any, ...], value: Any, what: str, count: int, bad: int) -> None:
    cluster = hosts(count)
    for each in cluster.values():
        each["matrix_s"] = [0.01, 0.01]
    place: Any = cluster[f"n{bad}"]
    for key in path[:-1]:
        place[key] = type(place[key])(place[key])  # the healthy hosts share it
        place = place[key]
    place[path[-1]] = value
    (finding,) = findings(cluster)
    assert finding.harmful
    if count == 2 and ("elsewhere" in what and path[0] != "matrix_s"):  # of two, either may be the wrong one
        name, _, _ = what.partition(" ")
        shown, usual = what.removeprefix(f"{name} ").removesuffix(" elsewhere").split(", and ")
        both = [shown, usual] if bad == 1 else [usual, shown]
        assert finding.line == f"n1 and n2 differ: {name} {' / '.join(both)}"
        assert not finding.excludable
    else:
        assert (finding.line, finding.excludable) == (f"n{bad}: {what}", True)


def test_nobody_is_accused_without_a_majority() -> None:
    cluster = hosts(6)
    versions = ["2.11.0", "2.11.0", "2.12.0", "2.13.0", "2.13.0", "2.13.0"]
    for facts_, version, time_s in zip(cluster.values(), versions, [0, 0, 0, 9, 9, 9], strict=True):
        facts_["versions"]["torch"], facts_["time_s"] = version, time_s
    differing, clocks = findings(cluster)
    assert differing.line == (
        "n1, n2, n3 and 3 more differ: torch 2.11.0 (n1 and n2) / 2.12.0 (n3) / 2.13.0 (n4, n5 and n6)"
    )
    assert (differing.harmful, differing.excludable) == (True, False)
    assert clocks.line == "n1, n2, n3 and 3 more differ: clocks by 9.0 s"
    assert (clocks.harmful, clocks.excludable) == (False, False)
    cluster["n3"]["versions"]["torch"] = "2.13.0"  # now most hosts have it
    cluster["n3"]["time_s"] = 9
    assert [finding.line for finding in findings(cluster) if finding.harmful] == [
        "n1: torch 2.11.0, and 2.13.0 elsewhere", "n2: torch 2.11.0, and 2.13.0 elsewhere",
    ]  # fmt: skip


def test_clocks_of_two_hosts() -> None:
    cluster = hosts(2)
    cluster["n1"]["time_s"], cluster["n2"]["time_s"] = 1000.0, 1007.0
    assert [finding.line for finding in findings(cluster)] == ["n1 and n2 differ: clocks by 7.0 s"]


def test_slow_disks_and_wrong_clocks_do_no_harm() -> None:
    cluster = hosts()
    cluster["n2"]["time_s"] += 7
    cluster["n3"]["disks"]["run"] |= {"write_bytes_per_s": 2e6, "write_s": 2.0}
    first, second = findings(cluster)
    assert (first.host, second.host, first.harmful, second.harmful) == ("n2", "n3", False, False)
    assert first.what.startswith("its clock is +")
    assert second.what.startswith("run folder /runs: writes 2.0 MB/s")


def test_another_cpu_is_reported_where_cpus_do_the_work() -> None:
    cluster = hosts()
    cluster["n1"]["cpu"]["model"] = "EPYC 7302"
    assert findings(cluster) == []  # GPUs do the work
    for facts_ in cluster.values():
        facts_["devices"] = [{"name": "cpu", "uuid": None, "total_bytes": 1, "used_bytes": 0}]
    (finding,) = findings(cluster)
    assert (finding.line, finding.harmful) == ("n1: CPU EPYC 7302, and EPYC 7763 elsewhere", False)
    cluster["n2"]["cpu"]["model"] = "EPYC 7302"
    (finding,) = findings(cluster)
    text = "n1, n2, n3 and n4 differ: CPU EPYC 7302 (n1 and n2) / EPYC 7763 (n3 and n4)"
    assert (finding.line, finding.harmful) == (text, False)


def test_cpu_and_memory_of_a_host(tmp_path: Path) -> None:
    this = cpu_facts()
    assert this["cores"] == psutil.cpu_count()
    assert this["total_bytes"] == psutil.virtual_memory().total
    assert this["available_bytes"] == pytest.approx(psutil.virtual_memory().available, rel=0.2)
    (tmp_path / "x86").write_text(
        "processor\t: 0\nmodel name\t: EPYC: 7763\nprocessor\t: 1\nmodel name\t: other\n"
    )
    (tmp_path / "arm").write_text("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n")
    (tmp_path / "memory").write_text("MemTotal: 100 kB\nMemAvailable:   many kB\n")
    assert cpu_facts(cpus=tmp_path / "x86", memory=tmp_path / "none") == {
        "model": "EPYC: 7763", "cores": os.cpu_count(), "total_bytes": None, "available_bytes": None,
    }  # fmt: skip
    arm = cpu_facts(cpus=tmp_path / "arm", memory=tmp_path / "memory")
    assert arm["model"] == f"{platform.machine()} 0x41 0xd4f"
    assert (arm["total_bytes"], arm["available_bytes"]) == (102400, None)


def test_caches_that_can_not_be_written_do_no_harm() -> None:
    cluster = hosts()
    good = {"folder": "/hf", "cache": True, "free_bytes": 50 * GIB, "write_s": 0.1, "write_bytes_per_s": 1e7}
    for host in ("n1", "n2", "n3"):  # n4 does not set the variable
        cluster[host]["disks"]["HF_HOME"] = {**good, "error": "Read-only file system"}
    assert findings(cluster) == []  # a cache that a site has filled
    cluster["n1"]["disks"]["HF_HOME"] = good
    cluster["n3"]["disks"]["HF_HOME"] = {**good, "free_bytes": 1e8}
    (finding,) = findings(cluster)  # two of four hosts
    text = "n2 and n3: HF_HOME folder /hf: Read-only file system (shared by 2 of 4 hosts)"
    assert (finding.line, finding.harmful) == (text, False)
    cluster["n2"]["disks"]["HF_HOME"] = good
    cluster["n3"]["disks"]["HF_HOME"] = {**good, "write_s": 1.0, "write_bytes_per_s": 1e6}
    (finding,) = findings(cluster)
    assert (finding.line, finding.harmful) == (
        "n3: HF_HOME folder /hf: writes 1.0 MB/s, and 10.0 elsewhere",
        False,
    )
    full = {"HF_HOME": {**good, "error": "No space left on device"}}
    assert told({"n1": {**facts(1), "disks": full}}) == [
        ("n1", "HF_HOME folder /hf: No space left on device")
    ]


def test_folders_of_caches(tmp_path: Path) -> None:
    variables = {
        "HF_HOME": f"{tmp_path}/hf", "XDG_CACHE_HOME": f"{tmp_path}/hf/../hf",
        "TRITON_CACHE_DIR": f"{tmp_path}/run/triton", "TORCHINDUCTOR_CACHE_DIR": "", "TMPDIR": "/tmp",
    }  # fmt: skip
    caches = host_facts.cache_folders(variables, other_than=[tmp_path / "run"])
    assert caches == {"HF_HOME": tmp_path / "hf"}
    disks = host_facts.host_facts(folders={"run": tmp_path}, caches=caches, versions={}, nvml=None)["disks"]
    assert (disks["run"]["cache"], disks["HF_HOME"]["cache"]) == (False, True)
    assert disks["HF_HOME"]["folder"] == f"{tmp_path}/hf"
    assert not (tmp_path / "hf").exists()
    written = disks["HF_HOME"]["write_bytes_per_s"] * disks["HF_HOME"]["write_s"]
    assert written == pytest.approx(host_facts.CACHE_WRITTEN_BYTES)


def test_packages_that_differ_are_named() -> None:
    by_host = {"n1": {"a": "1", "b": "2"}, "n2": {"a": "1", "b": "3"}, "n3": {"a": "1"}}
    assert different_packages(by_host) == {"b": {"n1": "2", "n2": "3", "n3": None}}
    cluster = hosts(3)
    cluster["n2"]["versions"]["packages"] = "bb"
    cluster["n2"]["differing"] = ["b 3"]
    assert told(cluster) == [("n2", "other packages: b 3")]


def test_versions_that_differ_are_a_table_by_host(tmp_path: Path) -> None:
    cluster = hosts(6)
    cluster["n2"]["versions"] |= {"torch": "2.11.0", "packages": "bb"}
    packages = {
        "xxhash": {host: "0.1" if host == "n2" else "3.8.1" for host in cluster},
        "torch": {host: "2.11.0+cpu" if host == "n2" else "2.13.0+cpu" for host in cluster},
    }
    differences = start_checks.different_versions(cluster, packages=packages)
    assert list(differences) == ["torch", "xxhash"]
    lines = [
        "        n1, n3, n4 and 2 more  n2",
        "torch   2.13.0                 2.11.0",
        "xxhash  3.8.1                  0.1",
    ]
    assert difference_table(differences) == lines
    assert difference_table(start_checks.different_versions(hosts(3), packages={})) == []
    rows = {f"p{at}": {"n1": "1", "n2": None} for at in range(22)}
    assert difference_table(rows)[-2:] == ["p19  1   missing", "and 2 more"]
    each = {"p": {f"n{at}": str(at) for at in range(8)}}
    assert difference_table(each)[-2:] == ["p  0   1   2   3   4   5", "and 2 more groups of hosts"]
    long = {"p": {f"node{at:03}-of-a-long-name": "2" if at == 1 else "1" for at in range(21)}}
    assert difference_table(long)[0].split("  ")[-2].endswith(" and 17 more")
    folder = RunFolder(tmp_path)
    for content in (
        5,
        {"differences": [1]},
        {"differences": {"a": 5, "b": {"n1": "1"}}},
        {"differences": {"a": {"n1": [1]}}},
    ):
        folder.preflight.write_text(json.dumps(content))
        assert difference_lines(folder) == []
    folder.preflight.write_text(json.dumps({"differences": {"\x1b": {"\x1b[0m": "\x1b", "b": "9" * 500}}}))
    assert "\x1b" not in "".join(difference_lines(folder))
    assert max(map(len, difference_lines(folder))) < 200


def test_facts_of_this_machine(tmp_path: Path) -> None:
    written = disk(tmp_path)
    assert written["free_bytes"] > 0
    assert written["write_bytes_per_s"] * written["write_s"] == pytest.approx(host_facts.WRITTEN_BYTES)
    assert disk(tmp_path / "missing")["error"] == "No such file or directory"
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"
    (tmp_path / "version").write_text(line)
    assert driver_version(tmp_path / "version") == "570.86.15"
    (tmp_path / "version").write_text(line.replace("Open Kernel Module for x86_64", "x86_64 Kernel Module"))
    assert driver_version(tmp_path / "version") == "570.86.15"
    assert driver_version(tmp_path / "none") is None


def test_a_spare_is_checked_alone(tmp_path: Path) -> None:
    """By what needs no other host."""
    devices = [torch.device("cpu")] * 2
    assert start_checks.check_alone(RunFolder(tmp_path), host="n3", devices=devices) == []
    gone = RunFolder(tmp_path / "gone")
    (finding,) = start_checks.check_alone(gone, host="n3", devices=devices)
    assert (finding.line, finding.harmful) == (f"n3: run folder {gone.path}: No such file or directory", True)


def test_ranks_are_joined_by_host() -> None:
    gpus = [{"uuid": "GPU-a", "processes": [11, 12, 99]}, {"uuid": "GPU-z", "processes": [5]}]
    device = {"uuid": "GPU-a", "name": "H100"}
    ranks = [
        {"host": "n1", "pid": 11, "device": device, "facts": {"gpus": gpus}},
        {"host": "n1", "pid": 12, "device": device, "facts": None},
    ]
    (facts,) = start_checks.by_host(ranks, matrix_s=[0.1, 0.2]).values()
    assert facts["matrix_s"] == [0.1, 0.2]
    assert facts["devices"] == [device, device]
    assert facts["gpus"] == [{"uuid": "GPU-a", "processes": [11, 12, 99], "foreign": [99]}]


def test_the_host_that_is_to_blame_ends_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = hosts()
    cluster["n3"]["devices"] = []
    monkeypatch.setattr(start_checks, "_facts_of_rank", lambda *_, **__: {})
    monkeypatch.setattr(start_checks.exchange, "all_gather", lambda _: [])
    monkeypatch.setattr(start_checks, "by_host", lambda *_, **__: cluster)
    monkeypatch.setattr(start_checks, "matrix_times_s", lambda _: [])
    monkeypatch.setattr(start_checks, "all_reduce_times_s", lambda _: [])

    def started(act: str, *, host: str) -> None:
        config = SimpleNamespace(preflight=PreflightConfig(act=act))
        world = World(1, 4, 0, 1, 1, 4, host=host, launcher="slurm", attempt="x")
        start_checks.check(
            RunFolder(tmp_path), config=config, world=world, device=torch.device("cpu"),
            xids=XidEvents(None, None),
        )  # type: ignore[arg-type]  # fmt: skip

    started("report", host="n3")
    started("off", host="n3")
    what = "n3: devices none, and 2 x H100 elsewhere"
    with pytest.raises(PreflightError, match=f"^{what}. Try launcher.exclude=n3, or") as stopped:
        started("stop", host="n3")
    assert stopped.value.details == {"exclude": []}
    with pytest.raises(PreflightError, match=f"^{what}$") as stopped:
        started("exclude", host="n3")
    assert stopped.value.details == {"exclude": ["n3"]}
    with pytest.raises(FollowerError, match=f"ended with {what}"):
        started("exclude", host="n1")


@pytest.mark.parametrize("act", ["stop", "exclude"])
def test_hosts_that_differ_without_a_majority_stop_and_stay(act: str) -> None:
    cluster = hosts(2)
    cluster["n1"]["versions"]["torch"] = "2.11.0"
    cluster["n2"]["gpus"] = [{**HEALTHY_GPU, "bad_rows": True}]  # excludable, but the other would stay
    what = "n1 and n2 differ: torch 2.11.0 / 2.13.0"
    with pytest.raises(PreflightError, match=f"^{what}. No host alone is to blame") as stopped:
        act_on(findings(cluster), act=act, host="n1", hosts=list(cluster))
    assert stopped.value.details == {"exclude": []}
    with pytest.raises(FollowerError, match=f"ended with {what}"):
        act_on(findings(cluster), act=act, host="n2", hosts=list(cluster))


def test_the_warning_excludes_hosts_to_blame_only(capsys: pytest.CaptureFixture[str]) -> None:
    warn(
        [
            Finding("n1", "differ: torch 1 / 2", others=("n2",)),
            Finding("n3", "slow"),
            Finding("n2", "late", harmful=False),
        ]
    )
    assert capsys.readouterr().err.splitlines() == [
        "WARNING: preflight: n1 and n2 differ: torch 1 / 2",
        "WARNING: preflight: n3: slow",
        "WARNING: preflight: n2: late",
        "To start without them: launcher.exclude=n3",
    ]


def test_what_most_hosts_share_excludes_none() -> None:
    cluster = hosts()
    full = {"folder": "/runs", "cache": False, "error": "No space left on device"}
    for host in ("n1", "n2", "n4"):
        cluster[host]["disks"] = {"run": full}
    cluster["n3"]["gpus"] = [{**HEALTHY_GPU, "throttled": ["too hot"]}]
    shared, hot = findings(cluster)
    text = "n1, n2 and n4: run folder /runs: No space left on device (shared by 3 of 4 hosts)"
    assert (shared.line, shared.harmful, shared.excludable) == (text, True, False)
    assert (hot.line, hot.excludable) == ("n3: GPU 0: low clocks (too hot)", True)
    with pytest.raises(PreflightError, match=re.escape(f"{text}. No host alone is to blame")) as stopped:
        act_on([shared, hot], act="exclude", host="n1", hosts=list(cluster))
    assert stopped.value.details == {"exclude": []}
    cluster["n1"]["disks"] = cluster["n2"]["disks"] = hosts()["n1"]["disks"]
    assert [(finding.host, finding.excludable) for finding in findings(cluster)] == [
        ("n3", True),
        ("n4", True),
    ]
    two = hosts(2)
    two["n2"]["disks"] = {"run": full}  # half of the hosts, but it is one
    assert [(finding.host, finding.excludable) for finding in findings(two)] == [("n2", True)]


def test_all_accused_hosts_are_excluded_at_once() -> None:
    host_findings = [
        Finding("n2", "hot"),
        Finding("n4", "slow"),
        Finding("n4", "late"),
        Finding("n1", "x", harmful=False),
    ]
    cluster = [f"n{number}" for number in range(1, 6)]
    for host in ("n2", "n4"):
        with pytest.raises(PreflightError, match=r"^n2: hot; also accused: n4$") as stopped:
            act_on(host_findings, act="exclude", host=host, hosts=cluster)
        assert stopped.value.details == {"exclude": ["n2", "n4"]}
    with pytest.raises(PreflightError, match=r"also accused: n4\. Try \"launcher.exclude='n2,n4'\", or"):
        act_on(host_findings, act="stop", host="n2", hosts=cluster)
    with pytest.raises(FollowerError):
        act_on(host_findings, act="exclude", host="n1", hosts=cluster)
    with pytest.raises(PreflightError) as stopped:  # nobody would be left
        act_on(host_findings, act="exclude", host="n2", hosts=["n2", "n4"])
    assert stopped.value.details == {"exclude": []}


def test_accused_hosts_are_excluded_from_the_next_start(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    limits = RestartLimits(max_restarts=0, max_requeues=0, rolls_back=False, start=0)
    for number in range(MOST_EXCLUSIONS + 1):
        attempts.end(folder, how=failure.PREFLIGHT, host="n0", exclude=["n0", f"n{number}"])
        decision = decide(attempts.recent_ends(folder), limits=limits)
        assert decision.action == (REQUEUE if number < MOST_EXCLUSIONS else END)
        assert hosts_to_exclude(folder) == [f"n{at}" for at in range(number + 1)]
    assert len(attempts.recent_ends(folder)) == MOST_EXCLUSIONS + 1


def test_the_hosts_come_from_the_record_of_a_rank(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    strategy = {"name": "data", "execution": "spmd", **Layout(replicate=4).degrees}
    config = {
        "nodes": 4, "gpus_per_node": 1, "strategy": strategy,
        "training": {"steps": 1, "on_nonfinite": "stop"}, "task": {"name": "train"},
        "launcher": {"max_requeues": 0, "max_restarts": 0},
    }  # fmt: skip
    folder.config.write_text(json.dumps(config))
    world = World(1, 4, 0, 1, 1, 4, host="n2", launcher="slurm", attempt="x")
    error = PreflightError("n2: hot; also accused: n4", exclude=["n2", "n4"])
    failure.record_exception(folder, world=world, error=error)
    assert conclude(folder, returncode=1) == "rank 1 on n2 failed first: n2: hot; also accused: n4"
    assert after_failure(folder).action == REQUEUE
    assert hosts_to_exclude(folder) == ["n2", "n4"]


def test_a_host_to_blame_is_a_sentence_and_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    for error, first in (
        (PreflightError("n2: hot", exclude=[]), "n2: hot\n"),
        (FabricError("sockets (fabric.require=true)"), "sockets (fabric.require=true)\n"),
        (FollowerError("ended with n2: hot"), "ended with n2: hot\n"),
    ):
        main.report(error)
        assert capsys.readouterr().err == first
    try:
        raise ValueError("wrong")
    except ValueError as error:
        main.report(error)
    assert capsys.readouterr().err.startswith("Traceback (most recent call last):")
