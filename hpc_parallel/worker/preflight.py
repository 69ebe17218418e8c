"""Compare the hosts of a run before its task begins, so that a bad one is named and not waited for."""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median_low
from typing import Any

import torch
import torch.distributed as dist

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.record.provenance import installed_packages
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.strategies import exchange
from hpc_parallel.supervise.host_facts import different_packages, host_facts
from hpc_parallel.supervise.preflight_findings import SLOW, Finding, findings
from hpc_parallel.supervise.topology import nvml_module
from hpc_parallel.supervise.world import World
from hpc_parallel.training.nonfinite import FollowerError

OFF, REPORT, EXCLUDE = "off", "report", "exclude"
ROUNDS, ROUND_S = 3, 0.2  # of matrix products; the fastest round counts
MOST_TRIES = 3  # while a rank seems slow: noise seldom comes three times to the same one
SIDES = {"cpu": 512, "cuda": 4096}
MOST_PACKAGES = 5  # that a finding names


class PreflightError(RuntimeError):
    """Raised on the ranks of the host that is to blame. `details` is for `failure.json`."""

    def __init__(self, message: str, *, exclude: bool) -> None:
        super().__init__(message)
        self.details = {"exclude": exclude}


def check(folder: RunFolder, *, config: RunConfig, world: World, device: torch.device) -> None:
    """Check all hosts as `preflight.act` says; a collective call. Rank 0 writes `preflight.json`.

    Raises PreflightError on the ranks of a harmful host and FollowerError on the others, if `preflight.act`
    is `stop` or `exclude`.
    """
    act = config.preflight.act
    if act == OFF:
        if world.rank == 0:
            folder.preflight.unlink(missing_ok=True)  # of an earlier start
        return
    began = time.perf_counter()
    ranks = exchange.all_gather(_facts_of_rank(folder, world=world, device=device))
    hosts = by_host(ranks, matrix_s=matrix_times_s(device) if world.nodes > 1 else [])
    _add_packages(hosts, world=world)
    found = findings(hosts)
    if world.rank == 0:
        record = [finding.as_record() for finding in found]
        took_s = time.perf_counter() - began
        write_json(folder.preflight, {"took_s": took_s, "hosts": hosts, "findings": record})
        _warn(found)
    harmful = [finding for finding in found if finding.harmful]
    if harmful and act != REPORT:
        _stop(harmful[0], world=world, exclude=act == EXCLUDE and len(hosts) > 1)


def by_host(ranks: Sequence[Mapping[str, Any]], *, matrix_s: Sequence[float]) -> dict[str, dict[str, Any]]:
    """The facts of each host, with the devices and times of all its ranks."""
    times = dict(enumerate(matrix_s))
    hosts = {rank["host"]: dict(rank["facts"]) for rank in ranks if rank["facts"] is not None}
    for host, facts in hosts.items():
        numbers = [number for number, rank in enumerate(ranks) if rank["host"] == host]
        own = [ranks[number] for number in numbers]
        facts["devices"] = [rank["device"] for rank in own]
        facts["matrix_s"] = [times[number] for number in numbers if number in times]
        used = {rank["device"]["uuid"] for rank in own}
        facts["gpus"] = [gpu for gpu in facts["gpus"] if gpu["uuid"] in used]
        pids = {rank["pid"] for rank in own}
        for gpu in facts["gpus"]:  # in a container the ids may be those of another name space
            visible = pids & set(gpu["processes"])
            gpu["foreign"] = sorted(set(gpu["processes"]) - pids) if visible else []
    return hosts


def _facts_of_rank(folder: RunFolder, *, world: World, device: torch.device) -> dict[str, Any]:
    facts = None
    if world.local_rank == 0:
        folders = {"run": folder.path, "temporary": Path(tempfile.gettempdir())}
        facts = host_facts(folders=folders, versions=_versions(device), nvml=_nvml(device))
    dist.barrier()
    before = time.perf_counter()
    dist.barrier()
    if facts is not None:  # both barriers end at the same moment everywhere, up to what one takes
        facts |= {"time_s": time.time(), "time_tolerance_s": time.perf_counter() - before}
    return {"host": world.host, "pid": os.getpid(), "facts": facts, "device": describe_device(device)}


def matrix_times_s(device: torch.device) -> list[float]:
    """The seconds of one matrix product on each rank, by rank; a collective call."""
    fastest = math.inf
    times: list[float] = []
    for _ in range(MOST_TRIES):
        fastest = min(fastest, product_time_s(device))
        (times,) = exchange.all_gather_numbers([fastest], device=torch.device("cpu"))
        if max(times) <= SLOW * median_low(times):
            break
    return times


def product_time_s(device: torch.device) -> float:
    """The seconds of one matrix product, in the fastest of ROUNDS."""
    side = SIDES[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    one, other = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
    one @ other  # loads the library
    times = []
    for _ in range(ROUNDS):
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < ROUND_S:
            one @ other
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            count += 1
        times.append((time.perf_counter() - began) / count)
    return min(times)


def describe_device(device: torch.device) -> dict[str, Any]:
    """`name`, `uuid`, `total_bytes`, and `used_bytes` of other processes (on CPUs not known: 0)."""
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


def _nvml(device: torch.device) -> Any:
    return nvml_module() if device.type == "cuda" else None


def _add_packages(hosts: Mapping[str, dict[str, Any]], *, world: World) -> None:
    """Say for each host which packages differ, if any does; a collective call."""
    if len({facts["versions"]["packages"] for facts in hosts.values()}) == 1:
        return
    ranks = exchange.all_gather({
        "host": world.host, "packages": installed_packages() if world.local_rank == 0 else None,
    })  # fmt: skip
    table = different_packages({
        rank["host"]: rank["packages"] for rank in ranks if rank["packages"] is not None
    })  # fmt: skip
    for host, facts in hosts.items():
        own = [f"{name} {versions[host] or 'missing'}" for name, versions in table.items()]
        facts["differing"] = own[:MOST_PACKAGES] + [f"and {len(own) - MOST_PACKAGES} more"] * (
            len(own) > MOST_PACKAGES
        )


def _warn(found: Sequence[Finding]) -> None:
    for finding in found:
        print(f"WARNING: preflight: {finding.host}: {finding.what}", file=sys.stderr, flush=True)
    if harmful := list(dict.fromkeys(finding.host for finding in found if finding.harmful)):
        print(f"To start without: launcher.exclude={','.join(harmful)}", file=sys.stderr, flush=True)


def _stop(finding: Finding, *, world: World, exclude: bool) -> None:
    if world.host == finding.host:
        advice = "" if exclude else f". Try launcher.exclude={finding.host}, or preflight.act=report"
        raise PreflightError(f"{finding.host}: {finding.what}{advice}", exclude=exclude)
    raise FollowerError(f"ended with {finding.host}: {finding.what}")
