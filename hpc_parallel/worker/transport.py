"""Prove what carries the data between ranks, before the task begins: NCCL's log says what it chose."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hpc_parallel.config.fabric_kinds import AUTO, EFA, RDMA, SLINGSHOT, TCP
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import DamagedError, read_tail
from hpc_parallel.strategies import exchange
from hpc_parallel.supervise import nccl_log
from hpc_parallel.supervise.fabric_kind import FabricDevices
from hpc_parallel.supervise.nccl_log import Transport
from hpc_parallel.supervise.world import World

LOG_BYTES = 2**24


class FabricError(RuntimeError):
    """Data between nodes does not go the way that the site expects."""


@dataclass(frozen=True)
class Findings:
    """The same on all ranks. kinds, devices: of the fabric, by host; transport: None without NCCL."""

    expected: str
    kinds: Mapping[str, str]
    devices: Mapping[str, str]
    transport: Transport | None

    def as_record(self, problem: str | None) -> dict[str, Any]:
        """The key `transport` of `environment.json`."""
        nccl = {"backend": "gloo"} if self.transport is None else self.transport.as_record()
        return {"expected": self.expected, "devices": dict(self.devices), **nccl, "problem": problem}


def find_transport(
    folder: RunFolder, *, config: RunConfig, world: World, hosts: Sequence[str], devices: FabricDevices
) -> Findings:
    """Find what carries the data; a collective call. NCCL connects the ranks in its first collective.

    hosts: of all ranks, by rank.
    """
    wanted = config.cluster.fabric
    transport = None
    if "nccl" in dist.get_backend_config():
        dist.all_reduce(torch.zeros(1, device="cuda"))
        torch.cuda.synchronize()
        log = _own_log(folder, rank=world.rank)
        transport = nccl_log.parse(log, hosts=hosts)
    found = {
        "host": world.host,
        "kind": devices.kind,
        "devices": devices.describe(devices.kind if wanted == AUTO else wanted),
        "transport": transport and transport.as_record(),
    }
    ranks = exchange.all_gather(found)
    kinds = {rank["host"]: rank["kind"] for rank in ranks}
    detected = next((kind for kind in RDMA if kind in kinds.values()), TCP)
    return Findings(
        expected=detected if wanted == AUTO else wanted,
        kinds=kinds,
        devices={rank["host"]: rank["devices"] for rank in ranks},
        transport=transport and nccl_log.merged([Transport.from_record(rank["transport"]) for rank in ranks]),
    )


def problem_of(found: Findings, *, require: bool) -> str | None:
    """Why data between nodes does not go as expected, in one sentence; None if it does.

    gloo always uses sockets. That is a problem only if `fabric.require` asks for something else.
    """
    if len(found.kinds) < 2:
        return None
    if found.expected not in RDMA:
        return "no host has a device of a fabric with RDMA" if require else None
    expectation = f"the fabric should be {found.expected} ({_devices(found)})"
    if found.transport is None:
        return f"gloo sends between nodes through sockets, and {expectation}" if require else None
    if not found.transport.pairs.get(nccl_log.ACROSS):
        hidden = f"NCCL's log does not say what carries data between nodes: unset {nccl_log.DEBUG}"
        return f"{hidden}; {expectation}"
    if nccl_log.SOCKETS not in found.transport.across:
        return None
    plugin = "; the plugin aws-ofi-nccl was not loaded" if found.expected in (SLINGSHOT, EFA) else ""
    return f"NCCL sends between nodes through sockets ({nccl_log.SOCKETS}), and {expectation}{plugin}"


def report(problem: str, *, require: bool) -> None:
    """Warn of the problem, once for all ranks. Raises FabricError on all ranks if `require`."""
    if require:
        raise FabricError(f"{problem} (fabric.require=true)")
    if dist.get_rank() == 0:
        print(f"WARNING: {problem}", file=sys.stderr, flush=True)


def _devices(found: Findings) -> str:
    """The hosts without a device, or the devices if each host has some."""
    without = [host for host, devices in found.devices.items() if devices == "no device"]
    if without:
        return f"no active device on {', '.join(without[:8])}" + " and others" * (len(without) > 8)
    return next(iter(found.devices.values()))


def _own_log(folder: RunFolder, *, rank: int) -> str:
    with suppress(OSError, DamagedError):
        return read_tail(folder.nccl_log(rank), limit_bytes=LOG_BYTES).decode(errors="replace")
    return ""
