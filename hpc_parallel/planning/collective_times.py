"""The times of collectives: of a machine profile, and planned for the groups of a layout.

A machine profile is the `machine.yaml` of `task=collectives`.

time = latency + bytes on the bus / bandwidth (the alpha-beta model; Hockney 1994), where the bytes on the bus
are the size times the bus factor of NVIDIA's nccl-tests (PERFORMANCE.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.config.site_schema import MachineConfig
from hpc_parallel.planning.hardware import Hardware, Link
from hpc_parallel.record.values import integer, number, table

FITTED_DTYPE = "float32"  # the times in a profile are those of this type
INSIDE, ACROSS = "inside a node", "across nodes"
_SIZE_BYTES = 2**30  # any size: the fit is a straight line

_BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_gather": lambda ranks: (ranks - 1) / ranks,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
    "broadcast": lambda ranks: 1.0,
    "reduce": lambda ranks: 1.0,
    "all_to_all": lambda ranks: (ranks - 1) / ranks,
    "send_recv": lambda ranks: 1.0,
    "barrier": lambda ranks: 0.0,
}


def bus_factor(operation: str, ranks: int) -> float:
    """Bus bandwidth / (size / time), as nccl-tests defines it."""
    return _BUS_FACTORS[operation](ranks)


@dataclass(frozen=True)
class PredictedTime:
    """The time of one collective. error: the mean relative error of the fit that it comes from."""

    latency_s: float
    transfer_s: float
    error: float

    @property
    def time_s(self) -> float:
        return self.latency_s + self.transfer_s


def ranks_of(machine: MachineConfig, group: str) -> int | None:
    """The number of ranks with which the profile measured a group; None for a group that it does not have."""
    return integer(_measured(machine, group).get("ranks"))


def _measured(machine: MachineConfig, group: str) -> dict[str, Any]:
    """The profile's table of a group, which may have another name there; empty if there is none."""
    if group in machine.collectives:
        return table(machine.collectives[group])
    groups = map(table, machine.collectives.values())
    return next((other for other in groups if group in (other.get("also") or ())), {})


def predict(
    machine: MachineConfig, *, group: str, operation: str, ranks: int, size_bytes: int
) -> PredictedTime | None:
    """The time of one collective of FITTED_DTYPE; None if the profile does not have it for `ranks`.

    group: as `task=collectives` names it (`across nodes`); size_bytes: as nccl-tests counts it.
    """
    fit = table(_measured(machine, group).get(operation))
    latency_s, rate = number(fit.get("latency_s")), number(fit.get("bandwidth_bytes_per_s"))
    if latency_s is None or ranks_of(machine, group) != ranks:
        return None
    transfer_s = size_bytes * bus_factor(operation, ranks) / rate if rate else 0.0
    return PredictedTime(latency_s, transfer_s, number(fit.get("fit_error")) or 0.0)


def with_measured_links(
    hardware: Hardware, machine: MachineConfig, *, turns: float = 1.0
) -> tuple[Hardware, list[str]]:
    """Returns `hardware` with the links that `task=collectives` has measured, and a name for each of them.

    A profile has the time of a whole collective. An all-reduce takes 2 (n - 1) steps of a ring inside a node,
    and one step for each doubling of the nodes across nodes, as in `GroupExchange`. Across nodes, each rank
    of a node is in a separate group, and all groups work at the same time. The profile has the rate of one
    group, so the rate of a node's adapters is the sum over its groups.

    turns: how many devices took turns on each core while the links were measured (`contended`). The
    links are those of a device that has a core to itself; a network is no faster for that.
    """
    node, network, measured = hardware.node, hardware.network, []
    if link := _link(machine, INSIDE, "all_reduce", steps=lambda ranks: 2 * (ranks - 1)):
        node = replace(node, collective=Link(link.latency_s / turns, link.bytes_per_s * turns))
        measured.append(f"all_reduce {INSIDE}")
    if link := _link(machine, INSIDE, "send_recv", steps=lambda ranks: 1):
        node = replace(node, send=Link(link.latency_s / turns, link.bytes_per_s * turns))
        measured.append(f"send_recv {INSIDE}")
    if link := _link(machine, ACROSS, "all_reduce", steps=math.log2):
        groups = ranks_of(machine, INSIDE) or node.devices
        rate = groups * link.bytes_per_s
        network = replace(network, latency_s=link.latency_s / turns, bytes_per_s=rate, share=1.0)
        measured.append(f"all_reduce {ACROSS}")
    return replace(hardware, node=node, network=network), measured


def on_nodes_of(config: RunConfig, hardware: Hardware) -> Hardware:
    """`hardware` with as many devices on a node as the run uses, and the links of a machine profile."""
    measured, _ = with_measured_links(hardware, config.machine)
    return replace(measured, node=replace(measured.node, devices=config.gpus_per_node))


def _link(
    machine: MachineConfig, group: str, operation: str, *, steps: Callable[[int], float]
) -> Link | None:
    """The latency of one step and the bus bandwidth; None if the profile does not have them."""
    ranks = ranks_of(machine, group)
    if ranks is None or ranks < 2:
        return None
    fit = predict(machine, group=group, operation=operation, ranks=ranks, size_bytes=_SIZE_BYTES)
    if fit is None or fit.transfer_s <= 0:
        return None
    return Link(fit.latency_s / steps(ranks), _SIZE_BYTES * bus_factor(operation, ranks) / fit.transfer_s)


@dataclass(frozen=True)
class GroupShape:
    """`ranks` ranks, each `stride` after the one before; nodes hold `node_devices` ranks in a row."""

    ranks: int
    stride: int
    node_devices: int

    @property
    def local(self) -> int:
        """The number of the group's ranks on one node, if the group's first rank is the node's first rank."""
        return min(self.ranks, math.ceil(self.node_devices / self.stride))

    @property
    def nodes(self) -> int:
        """The number of nodes that have ranks of the group."""
        return math.ceil(self.ranks / self.local)

    @property
    def sharing(self) -> int:
        """The number of such groups that use the adapters of a node at the same time."""
        return max(1, self.node_devices // self.local)


@dataclass(frozen=True)
class GroupExchange:
    """One collective of `bytes` (as nccl-tests counts them) in a group."""

    name: str
    operation: str
    bytes: float
    group: GroupShape

    def seconds(self, hardware: Hardware) -> float:
        """Latency of each step + bytes on the bus / bandwidth (alpha-beta; Hockney 1994)."""
        if self.group.ranks == 1:
            return 0.0
        return self._latency_s(hardware) + self._bus_bytes(hardware) / bus_bytes_per_s(self.group, hardware)

    def copying_s(self, hardware: Hardware) -> float:
        """Seconds that a CPU needs to copy the bytes: the transfer time inside a node, without a wire."""
        return self._bus_bytes(hardware) / hardware.node.collective.bytes_per_s

    def _bus_bytes(self, hardware: Hardware) -> float:
        factor = bus_factor(self.operation, self.group.ranks)
        return self.bytes * factor * hardware.ring_factors.get(self.operation, 1.0)

    def _latency_s(self, hardware: Hardware) -> float:
        if self.operation == "send_recv":  # all ranks send to the next one at the same time
            crosses = self.group.nodes > 1
            return hardware.network.latency_s if crosses else hardware.node.send.latency_s
        turns = 2 if self.operation == "all_reduce" else 1
        inside = turns * (self.group.local - 1) * hardware.node.collective.latency_s
        return inside + math.log2(self.group.nodes) * hardware.network.latency_s

    def formula(self, hardware: Hardware) -> str:
        group = self.group
        where = f"{group.ranks} ranks on {group.nodes} nodes" if group.nodes > 1 else f"{group.ranks} ranks"
        rate, on_bus = bus_bytes_per_s(group, hardware), self._bus_bytes(hardware)
        return (
            f"{self.operation} of {self.bytes:.4g} B, {where}: {self._latency_s(hardware) * 1e6:.1f} us + "
            f"{on_bus:.4g} B on the bus / {rate / 1e9:.4g} GB/s"
        )


def bus_bytes_per_s(group: GroupShape, hardware: Hardware) -> float:
    """The bandwidth inside a node, or a share of the node's adapters if that is less."""
    inside = hardware.node.collective.bytes_per_s
    if group.nodes == 1:
        return inside
    return min(inside, hardware.network.bytes_per_s * hardware.network.share / group.sharing)


def send_s(size_bytes: float, hardware: Hardware, *, crosses: bool, senders: int) -> float:
    """Seconds of a message to another rank. senders: ranks of a node that send to other nodes together."""
    rate = hardware.node.send.bytes_per_s
    if crosses:
        rate = min(rate, hardware.network.bytes_per_s * hardware.network.share / senders)
    return hardware.node.send.latency_s + size_bytes / rate
