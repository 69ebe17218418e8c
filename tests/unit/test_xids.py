"""Errors that NVIDIA's driver reports: read from a recorded kernel log and from a stand-in for NVML."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpc_parallel.failure import failure
from hpc_parallel.machine import host_facts
from hpc_parallel.machine.host_findings import RECENT_S, findings
from hpc_parallel.machine.world import World
from hpc_parallel.machine.xids import XidEvents, bus_address, logged_xids, parse_xids
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.start import start_checks
from tests.nvml import Nvml, NVMLError, not_supported
from tests.unit.test_preflight import HEALTHY_GPU, hosts

# Records of /dev/kmsg as drivers of several years write them. The second Xid 79 is of another GPU.
KERNEL_LOG = b"""\
6,1024,9000000,-;nvidia 0000:1a:00.0: enabling device (0140 -> 0142)
 SUBSYSTEM=pci
 DEVICE=+pci:0000:1a:00.0
4,1025,9500000,-;NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build
4,1090,100000000,-;NVRM: Xid (PCI:0000:1a:00): 31, pid=4711, name=python, Ch 00000008, intr 00000000, MMU
4,1091,200000000,-;NVRM: Xid (PCI:0000:1a:00): 48, pid='<unknown>', name=<unknown>, DBE (double bit error)
4,1092,210000000,-;NVRM: Xid (PCI:0000:1a:00): 63, pid=1896, Row Remapper: New row marked for remapping
4,1093,300000000,-;NVRM: Xid (PCI:0000:1A:00): 48, pid='<unknown>', name=<unknown>, DBE (double bit error)
4,1094,310000000,c;NVRM: Xid (0000:1b:00): 13, 0005 00000000 0000502d 00000104 00000000 00000100
4,1095,320000000,-;NVRM: Xid (PCI:0000:1b:00 GPU-I:05): 45, pid=17, name=python, Ch 00000011
4,1096,330000000,-;NVRM: Xid (PCI:0000:98:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus
4,1097,340000000,-;nvidia-nvswitch4: SXid (PCI:0000:c6:00.0): 19084, Non-fatal, Link 29 AN1 Heartbeat Timeout
6,1098,350000000,-;traps: NVRM: Xid (PCI:0000:1a:00): 79, what a program is named[99] trap
4,1099,360000000,-;NVRM: Xid (PCI:0000:1b:00): 999, pid=17, of a driver to come
"""
SEEN = [
    ("0000:1a:00", 31, 1, 900), ("0000:1a:00", 48, 2, 700), ("0000:1a:00", 63, 1, 790),
    ("0000:1b:00", 13, 1, 690), ("0000:1b:00", 45, 1, 680), ("0000:98:00", 79, 1, 670),
    ("0000:1b:00", 999, 1, 640),
]  # fmt: skip


def nvml(*waiting: int, refuses: bool = False) -> Nvml:
    """Three GPUs, of which the last is lost; `waiting` are events of GPU-a."""
    events = list(waiting)

    def handle_of(index: int) -> int:
        if index == 2:
            raise NVMLError("GPU is lost")
        return index

    def register(handle: int, kinds: int, watched: str) -> None:
        if refuses:
            not_supported()
        assert (handle, kinds, watched) == (0, 8, "set")

    def wait(watched: str, timeout_ms: int) -> Any:
        assert (watched, timeout_ms) == ("set", 0)
        if not events:
            raise NVMLError("Timeout")
        return SimpleNamespace(eventData=events.pop(0))

    buses = ["00000000:1A:00.0", b"00000000:1B:00.0"]
    return Nvml(
        3,
        nvmlDeviceGetHandleByIndex=handle_of,
        nvmlDeviceGetHandleByUUID=lambda uuid: {"GPU-a": 0, "GPU-b": 1}[uuid],
        nvmlDeviceGetUUID=lambda handle: ["GPU-a", "GPU-b"][handle],
        nvmlDeviceGetPciInfo=lambda handle: SimpleNamespace(busId=buses[handle]),
        nvmlEventSetCreate=lambda: "set",
        nvmlDeviceRegisterEvents=register,
        nvmlEventSetWait=wait,
    )


def test_the_kernel_log_has_the_xids_of_each_device() -> None:
    seen = parse_xids(KERNEL_LOG, now_s=1000.0)
    assert [(xid["bus"], xid["xid"], xid["count"], xid["last_s_ago"]) for xid in seen] == SEEN
    assert parse_xids(b"", now_s=1.0) == parse_xids(b"\xff\x00NVRM: Xid (", now_s=1.0) == []
    assert {bus_address(name) for name in ("00000000:1A:00.0", "0000:1a:00", "0000:1A:00.0")} == {
        "0000:1a:00"
    }


def test_a_log_that_has_no_more_records_is_not_waited_for(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    os.mkfifo(log)
    writer = os.open(log, os.O_RDWR)  # a reader that waits would wait until this end is closed
    os.write(writer, KERNEL_LOG)
    facts = logged_xids(log)
    os.close(writer)
    assert facts["kernel_log"] == "read"
    assert [(xid["bus"], xid["xid"], xid["count"]) for xid in facts["seen"]] == [xid[:3] for xid in SEEN]


def test_a_log_that_can_not_be_read_is_said_to_be_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unreadable = {"kernel_log": "not readable: No such file or directory", "seen": []}
    assert logged_xids(tmp_path / "none") == unreadable
    monkeypatch.setattr(host_facts, "logged_xids", partial(logged_xids, tmp_path / "none"))
    facts = host_facts.host_facts(folders={}, caches={}, versions={}, nvml=nvml())
    assert facts["xids"] == unreadable
    assert [gpu["xids"] for gpu in facts["gpus"]] == [[], []]
    assert host_facts.host_facts(folders={}, caches={}, versions={}, nvml=None)["xids"][
        "kernel_log"
    ].startswith("not read")


def test_each_gpu_gets_its_own_and_a_lost_one_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kmsg").write_bytes(KERNEL_LOG)
    monkeypatch.setattr(host_facts, "logged_xids", partial(logged_xids, tmp_path / "kmsg"))
    facts = host_facts.host_facts(folders={}, caches={}, versions={}, nvml=nvml())
    assert {gpu["uuid"]: [xid["xid"] for xid in gpu["xids"]] for gpu in facts["gpus"]} == {
        "GPU-a": [31, 48, 63], "GPU-b": [13, 45, 999],
    }  # fmt: skip
    json.dumps(facts)


def told(*numbers: int, ago_s: float = 7200.0, count: int = 1) -> list[tuple[str, str, bool]]:
    """The findings of a cluster in which the second GPU of n3 had these Xids."""
    cluster = hosts()
    xids = [{"bus": "0000:1b:00", "xid": xid, "count": count, "last_s_ago": ago_s} for xid in numbers]
    cluster["n3"]["gpus"] = [{**HEALTHY_GPU, "xids": []}, {**HEALTHY_GPU, "xids": xids}]
    return [(finding.host, finding.what, finding.harmful) for finding in findings(cluster)]


@pytest.mark.parametrize("number", [48, 62, 64, 74, 79, 94, 95, 119])
def test_an_error_of_the_hardware_harms(number: int) -> None:
    ((host, what, harmful),) = told(number)
    assert (host, harmful) == ("n3", True)
    assert what.startswith(f"GPU 1 (0000:1b:00): Xid {number} (")


@pytest.mark.parametrize("number", [13, 31, 43, 45, 999])
def test_an_error_of_a_program_accuses_nobody(number: int) -> None:
    assert told(number) == []


def test_the_finding_says_what_happened_and_when() -> None:
    assert told(79, count=3) == [
        ("n3", "GPU 1 (0000:1b:00): Xid 79 (the GPU fell off the bus), 3 times, the last 2.0 h ago", True)
    ]
    assert told(79, ago_s=0.0)[0][1].endswith("(the GPU fell off the bus), now")
    assert told(79, ago_s=100.0)[0][1].endswith("(the GPU fell off the bus), 2 min ago")
    assert [finding[2] for finding in told(63, 79)] == [False, True]
    assert [finding[2] for finding in told(79, ago_s=RECENT_S + 1)] == [False]


def test_two_hosts_with_the_same_error_are_both_to_blame() -> None:
    cluster = hosts()
    xid = {"bus": "0000:1b:00", "xid": 79, "count": 1, "last_s_ago": 0.0}
    for host, index in (("n1", 0), ("n3", 1)):
        gpus = [{**HEALTHY_GPU, "xids": []}, {**HEALTHY_GPU, "xids": []}]
        gpus[index] |= {"xids": [xid], "uncorrected_errors": 2}
        cluster[host]["gpus"] = gpus
    found = findings(cluster)
    assert all(finding.excludable for finding in found)
    assert [(finding.host, finding.what[:5]) for finding in found] == [
        ("n1", "GPU 0"), ("n1", "GPU 0"), ("n3", "GPU 1"), ("n3", "GPU 1"),
    ]  # fmt: skip


def test_events_are_taken_once_and_without_waiting() -> None:
    events = XidEvents(nvml(79, 48), "GPU-a")
    assert events.state == "watched"
    assert (events.new(), events.new()) == ([79, 48], [])
    assert XidEvents(nvml(79, refuses=True), "GPU-a").state == "not watched: Not Supported"
    assert XidEvents(nvml(79, refuses=True), "GPU-a").new() == []
    assert XidEvents(nvml(79), None).new() == XidEvents(None, "GPU-a").new() == []
    assert len(XidEvents(nvml(*[31] * 1000), "GPU-a").new()) == 100


def test_events_during_the_checks_are_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_checks, "gpu_uuid", lambda _: "GPU-a")
    monkeypatch.setattr(start_checks.exchange, "all_gather", lambda value: [json.loads(json.dumps(value))])
    cluster = hosts(1)
    in_the_kernel_log = {"bus": "0000:1a:00", "xid": 95, "count": 1, "last_s_ago": 3.0}
    gpu = {**HEALTHY_GPU, "uuid": "GPU-a", "bus": "0000:1a:00", "xids": [in_the_kernel_log]}
    cluster["n1"] |= {"gpus": [gpu], "xids": {"kernel_log": "read", "seen": []}}
    start_checks._add_xid_events(
        cluster, world=World(0, 1, 0, 1, 0, 1, host="n1", launcher="slurm", attempt="x"),
        device=torch.device("cpu"), xids=XidEvents(nvml(95, 95), "GPU-a"),
    )  # fmt: skip
    assert cluster["n1"]["xids"]["events"] == ["watched"]
    (finding,) = findings(cluster)
    assert finding.what.startswith("GPU 0 (0000:1a:00): Xid 95 (")
    assert finding.what.endswith("2 times, the last now")


def test_a_failure_names_what_the_gpu_reported(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    world = World(0, 1, 0, 1, 0, 1, host="n1", launcher="slurm", attempt="x")
    error = RuntimeError("CUDA error: unspecified launch failure")
    failure.record_exception(folder, world=world, error=error, xids=[79, 79])
    (record,) = failure.records(folder)
    assert record.message == (
        "RuntimeError: CUDA error: unspecified launch failure; "
        "its GPU reported Xid 79 (the GPU fell off the bus)"
    )
    assert record.details["xids"] == [79, 79]
