"""Finds out from NCCL's log what carries the data between ranks, before the task begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hpc_parallel.config.fabric_kinds import AUTO, EFA, RDMA, SLINGSHOT, TCP
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.machine import nccl_log
from hpc_parallel.machine.fabric_kind import FabricDevices
from hpc_parallel.machine.nccl_log import NcclTransport
from hpc_parallel.machine.world import World
from hpc_parallel.problems import print_warning
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import DamagedError, read_tail
from hpc_parallel.strategies import exchange

LOG_BYTES = 2**24
SMALL_BYTES, LARGE_BYTES = 4, 2**24  # NCCL uses other algorithms, and other connections, for large messages


class FabricError(RuntimeError):
    """Data between nodes does not go the way that the site expects."""


@dataclass(frozen=True)
class TransportCheck:
    """The result, the same on all ranks.

    kinds, devices: host -> the kind of its fabric, and the devices of the fabric. transport: None without
    NCCL.
    """

    expected: str
    kinds: Mapping[str, str]
    devices: Mapping[str, str]
    transport: NcclTransport | None

    def as_record(self, problem: str | None) -> dict[str, Any]:
        """The key `transport` of `environment.json`."""
        nccl = {"backend": "gloo"} if self.transport is None else self.transport.as_record()
        return {"expected": self.expected, "devices": dict(self.devices), **nccl, "problem": problem}


def find_transport(
    folder: RunFolder, *, config: RunConfig, world: World, hosts: Sequence[str], devices: FabricDevices
) -> TransportCheck:
    """Find what carries the data; a collective call.

    hosts: the host of each rank, by rank.
    """
    expected_kind = config.cluster.fabric
    transport = None
    if "nccl" in dist.get_backend_config():
        use_connections(torch.device("cuda"))
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        log = _own_log(folder, rank=world.rank)
        transport = nccl_log.parse(log, hosts=hosts)
    rank_facts = {
        "host": world.host,
        "kind": devices.kind,
        "devices": devices.describe(devices.kind if expected_kind == AUTO else expected_kind),
        "transport": transport and vars(transport),
    }
    ranks = exchange.all_gather(rank_facts)
    kinds = {rank["host"]: rank["kind"] for rank in ranks}
    detected = next((kind for kind in RDMA if kind in kinds.values()), TCP)
    return TransportCheck(
        expected=detected if expected_kind == AUTO else expected_kind,
        kinds=kinds,
        devices={rank["host"]: rank["devices"] for rank in ranks},
        transport=transport and nccl_log.merged([NcclTransport(**rank["transport"]) for rank in ranks]),
    )


def use_connections(device: torch.device) -> None:
    """Send what trainings send: small and large sums, a gather, and messages from rank to rank.

    NCCL 2.22 and later connects two ranks only when an algorithm first needs the connection. The log that is
    read afterwards says what is connected so far.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for size in (SMALL_BYTES, LARGE_BYTES):
        dist.all_reduce(torch.zeros(size // 4, device=device))
    part = torch.zeros(max(1, LARGE_BYTES // 4 // ranks), device=device)
    dist.all_gather([torch.empty_like(part) for _ in range(ranks)], part)
    if ranks > 1:  # in one batch: otherwise NCCL makes another communicator, which numbers ranks differently
        transfers = [
            dist.P2POp(dist.isend, part, (rank + 1) % ranks),
            dist.P2POp(dist.irecv, torch.empty_like(part), (rank - 1) % ranks),
        ]
        for work in dist.batch_isend_irecv(transfers):
            work.wait()


def problem_of(check: TransportCheck, *, require: bool) -> str | None:
    """Why data between nodes does not go as expected, in one sentence; None if it does.

    gloo always uses sockets. That is a problem only if `fabric.require` asks for something else.
    """
    if len(check.kinds) < 2:
        return None
    if check.expected not in RDMA:
        return "no host has a device of a fabric with RDMA" if require else None
    expectation = f"the fabric should be {check.expected} ({_devices(check)})"
    if check.transport is None:
        return f"gloo sends between nodes through sockets, and {expectation}" if require else None
    library = check.transport.library
    if not check.transport.pairs.get(nccl_log.ACROSS):
        hidden = f"{library}'s log does not say what carries data between nodes: unset {nccl_log.DEBUG}"
        return f"{hidden}; {expectation}"
    if nccl_log.SOCKETS not in check.transport.across:
        return None
    name = f"aws-ofi-{library.lower()}"
    plugin = f"; the plugin {name} was not loaded" if check.expected in (SLINGSHOT, EFA) else ""
    return f"{library} sends between nodes through sockets ({nccl_log.SOCKETS}), and {expectation}{plugin}"


def report(problem: str, *, require: bool) -> None:
    """Warn of the problem, once for all ranks. Raises FabricError on all ranks if `require`."""
    if require:
        raise FabricError(f"{problem} (fabric.require=true)")
    if dist.get_rank() == 0:
        print_warning(problem)


def _devices(check: TransportCheck) -> str:
    """The hosts without a device, or the devices if each host has some."""
    without = [host for host, devices in check.devices.items() if devices == "no device"]
    if without:
        return f"no active device on {', '.join(without[:8])}" + " and others" * (len(without) > 8)
    return next(iter(check.devices.values()))


def _own_log(folder: RunFolder, *, rank: int) -> str:
    with suppress(OSError, DamagedError):
        return read_tail(folder.nccl_log(rank), limit_bytes=LOG_BYTES).decode(errors="replace")
    return ""
