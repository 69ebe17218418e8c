"""The times of collectives in the groups of a layout, by which ranks share a node and its adapters."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpc_parallel.planning.collective_times import bus_factor
from hpc_parallel.planning.hardware import Hardware


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
