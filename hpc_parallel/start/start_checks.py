"""The start checks: compare the hosts of a run before its task begins, and name those that are unfit."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.machine.host_facts import cache_folders, different_packages, host_facts
from hpc_parallel.machine.host_findings import Finding, findings
from hpc_parallel.machine.topology import nvml_module
from hpc_parallel.machine.world import World
from hpc_parallel.machine.xids import XidEvents, event_records
from hpc_parallel.problems import as_override, print_warning
from hpc_parallel.record.provenance import installed_packages
from hpc_parallel.record.recorded_preflight import difference_table, listed_hosts
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.start.start_times import SUMMED_BYTES, all_reduce_times_s, matrix_times_s, product_times_s
from hpc_parallel.strategies import exchange
from hpc_parallel.strategies.exchange import FollowerError

OFF, STOP, EXCLUDE = "off", "stop", "exclude"
MOST_PACKAGES, MOST_RECORDED = 5, 100  # packages in a finding, and in `preflight.json`


def check(
    folder: RunFolder, *, config: RunConfig, world: World, device: torch.device, xids: XidEvents
) -> None:
    """Check all hosts as `preflight.act` says; a collective call. Rank 0 writes `preflight.json`.

    xids: a reader of new Xid events of this rank's device.

    Raises PreflightError on the ranks of a harmful host and FollowerError on the others, if `preflight.act`
    is `stop` or `exclude`.
    """
    act = config.preflight.act
    if act == OFF:
        if world.rank == 0:
            folder.preflight.unlink(missing_ok=True)  # written by an earlier start
        return
    began = time.perf_counter()
    ranks = exchange.all_gather(_facts_of_rank(folder, world=world, device=device))
    hosts = by_host(ranks, matrix_s=matrix_times_s(device) if can_compare(ranks, device) else [])
    for facts in hosts.values():
        facts["all_reduce_s"] = []  # it judges no host, because all ranks wait for the slowest
    for rank, time_s in zip(ranks, all_reduce_times_s(device), strict=False):
        hosts[rank["host"]]["all_reduce_s"].append(time_s)
    differences = different_versions(hosts, packages=_add_packages(hosts, world=world))
    _add_xid_events(hosts, world=world, device=device, xids=xids)
    host_findings = findings(hosts)
    if world.rank == 0:
        record = [vars(finding.recorded) for finding in host_findings]
        took_s = time.perf_counter() - began
        write_json(folder.preflight, {
            "took_s": took_s, "all_reduce_bytes": SUMMED_BYTES, "hosts": hosts, "findings": record,
            "differences": differences,
        })  # fmt: skip
        warn(host_findings)
        if lines := difference_table(differences):
            print("versions by host:", *lines, sep="\n", file=sys.stderr, flush=True)
    act_on(host_findings, act=act, host=world.host, hosts=list(hosts))


def can_compare(ranks: Sequence[Mapping[str, Any]], device: torch.device) -> bool:
    """Whether the devices can be compared. CPU processes of one host can't be, because they share cores."""
    return len({rank["host"] for rank in ranks}) > 1 or (device.type == "cuda" and len(ranks) > 1)


def by_host(ranks: Sequence[Mapping[str, Any]], *, matrix_s: Sequence[float]) -> dict[str, dict[str, Any]]:
    """The facts of each host, with the devices and times of all its ranks."""
    times = dict(enumerate(matrix_s))
    hosts = {rank["host"]: dict(rank["facts"]) for rank in ranks if rank["facts"] is not None}
    for host, facts in hosts.items():
        numbers = [number for number, rank in enumerate(ranks) if rank["host"] == host]
        host_ranks = [ranks[number] for number in numbers]
        facts["devices"] = [rank["device"] for rank in host_ranks]
        facts["matrix_s"] = [times[number] for number in numbers if number in times]
        used = {rank["device"]["uuid"] for rank in host_ranks}
        facts["gpus"] = [gpu for gpu in facts["gpus"] if gpu["uuid"] in used]
        pids = {rank["pid"] for rank in host_ranks}
        for gpu in facts["gpus"]:  # in a container, process ids may belong to another name space
            visible = pids & set(gpu["processes"])
            gpu["foreign"] = sorted(set(gpu["processes"]) - pids) if visible else []
    return hosts


def check_alone(folder: RunFolder, *, host: str, devices: Sequence[torch.device]) -> list[Finding]:
    """What the checks find on this host without any other, for a spare. devices: those of its ranks."""
    facts = _facts_of_host(folder, devices[0]) | {"time_s": time.time(), "time_tolerance_s": 0.0}
    ranks = [
        {"host": host, "pid": os.getpid(), "facts": facts, "device": describe_device(device)}
        for device in devices
    ]
    compared = [device for device in devices if device.type == "cuda"]
    return findings(by_host(ranks, matrix_s=[min(product_times_s(device)) for device in compared]))


def _facts_of_host(folder: RunFolder, device: torch.device) -> dict[str, Any]:
    folders = {"run": folder.path, "temporary": Path(tempfile.gettempdir())}
    caches = cache_folders(os.environ, other_than=folders.values())
    nvml = nvml_module() if device.type == "cuda" else None
    return host_facts(folders=folders, caches=caches, versions=_versions(device), nvml=nvml)


def _facts_of_rank(folder: RunFolder, *, world: World, device: torch.device) -> dict[str, Any]:
    facts = _facts_of_host(folder, device) if world.local_rank == 0 else None
    dist.barrier()
    before = time.perf_counter()
    dist.barrier()
    if facts is not None:  # a barrier ends at the same moment on all ranks, up to its duration
        facts |= {"time_s": time.time(), "time_tolerance_s": time.perf_counter() - before}
    return {"host": world.host, "pid": os.getpid(), "facts": facts, "device": describe_device(device)}


def describe_device(device: torch.device) -> dict[str, Any]:
    """`name`, `uuid`, `total_bytes`, and `used_bytes` of other processes (unknown on CPUs: 0)."""
    if device.type == "cpu":
        return {"name": "cpu", "uuid": None, "total_bytes": 1, "used_bytes": 0}
    free, total = torch.cuda.mem_get_info(device)
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "uuid": gpu_uuid(device),
        "total_bytes": total,
        "used_bytes": total - free - torch.cuda.memory_reserved(device),
    }


def gpu_uuid(device: torch.device) -> str | None:
    """The name by which NVML knows a GPU; None for a CPU."""
    return None if device.type == "cpu" else f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def _versions(device: torch.device) -> dict[str, str | None]:
    cuda = device.type == "cuda"
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if cuda else None
    return {"python": sys.version.split()[0], "torch": torch.__version__, "nccl": nccl}


Versions = dict[str, dict[str, str | None]]  # name -> host -> version, None if it is missing


def different_versions(hosts: Mapping[str, Mapping[str, Any]], *, packages: Versions) -> Versions:
    """The versions and packages that differ between the hosts, up to MOST_RECORDED."""
    by_host = {host: facts["versions"] for host, facts in hosts.items()}
    versions = {name: row for name, row in different_packages(by_host).items() if name != "packages"}
    rows = {**packages, **versions}  # torch is in both tables
    return {name: rows[name] for name in [*versions, *sorted(packages.keys() - versions)][:MOST_RECORDED]}


def _add_packages(hosts: Mapping[str, dict[str, Any]], *, world: World) -> Versions:
    """Add to each host's facts which packages differ; returns the table of these. A collective call."""
    if len({facts["versions"]["packages"] for facts in hosts.values()}) == 1:
        return {}
    ranks = exchange.all_gather(
        {"host": world.host, "packages": installed_packages() if world.local_rank == 0 else None}
    )
    table = different_packages(
        {rank["host"]: rank["packages"] for rank in ranks if rank["packages"] is not None}
    )
    for host, facts in hosts.items():
        differing = [f"{name} {versions[host] or 'missing'}" for name, versions in table.items()]
        facts["differing"] = differing[:MOST_PACKAGES] + [f"and {len(differing) - MOST_PACKAGES} more"] * (
            len(differing) > MOST_PACKAGES
        )
    return table


def _add_xid_events(
    hosts: Mapping[str, dict[str, Any]], *, world: World, device: torch.device, xids: XidEvents
) -> None:
    """Add the Xid events since the kernel logs were read. The matrix products may have caused them.

    A collective call.
    """
    ranks = exchange.all_gather(
        {"host": world.host, "uuid": gpu_uuid(device), "events": xids.new(), "state": xids.state}
    )
    for rank in ranks:
        facts = hosts[rank["host"]]
        facts["xids"].setdefault("events", []).append(rank["state"])
        for gpu in facts["gpus"]:
            if gpu["uuid"] == rank["uuid"]:
                records = event_records(rank["events"], bus=gpu["bus"])
                new = {record["xid"] for record in records}  # the kernel log may have them already
                gpu["xids"] = [record for record in gpu["xids"] if record["xid"] not in new] + records


class PreflightError(RuntimeError):
    """Raised on the ranks of the hosts that are to blame. `details` is for `failure.json`.

    exclude: the hosts that the next start leaves out; if empty, there is no next start.
    """

    def __init__(self, message: str, *, exclude: Sequence[str]) -> None:
        super().__init__(message)
        self.details = {"exclude": list(exclude)}


def warn(findings: Sequence[Finding]) -> None:
    """Print a line for each finding, and the override that leaves out the hosts to blame."""
    for finding in findings:
        print_warning(f"preflight: {finding.line}")
    if hosts := accused(findings):
        print(
            f"To start without them: {as_override('launcher.exclude', ','.join(hosts))}",
            file=sys.stderr,
            flush=True,
        )


def accused(findings: Sequence[Finding]) -> list[str]:
    """The hosts to blame for harmful findings."""
    return list(dict.fromkeys(finding.host for finding in findings if finding.harmful and finding.excludable))


def act_on(findings: Sequence[Finding], *, act: str, host: str, hosts: Sequence[str]) -> None:
    """Stop this rank if `act` is `stop` or `exclude` and a finding is harmful. All ranks decide alike.

    act: `preflight.act`. host: the host of this rank. hosts: all hosts of the run.

    Raises PreflightError on the ranks of all hosts to blame and FollowerError on the others.
    """
    harmful = [finding for finding in findings if finding.harmful]
    if not harmful or act not in (STOP, EXCLUDE):
        return
    # A finding about several hosts would occur again at the next start.
    first = next((finding for finding in harmful if not finding.excludable), harmful[0])
    blamed = accused(harmful) if first.excludable else [first.host]
    message = first.line + (f"; also accused: {listed_hosts(blamed[1:])}" if len(blamed) > 1 else "")
    if host not in blamed:
        raise FollowerError(f"ended with {message}")
    exclude = blamed if act == EXCLUDE and first.excludable and len(blamed) < len(hosts) else []
    raise PreflightError(message + ("" if exclude else _advice(first, blamed=blamed)), exclude=exclude)


def _advice(first: Finding, *, blamed: Sequence[str]) -> str:
    if first.excludable:
        return f". Try {as_override('launcher.exclude', ','.join(blamed))}, or preflight.act=report"
    return ". No host alone is to blame, so none is excluded. Correct the cause, or try preflight.act=report"
