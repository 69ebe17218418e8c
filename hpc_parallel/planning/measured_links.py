"""Replace the links of a hardware file by links that `task=collectives` has measured (`machine=NAME`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from hpc_parallel.config.site_schema import MachineConfig
from hpc_parallel.planning.collective_times import bus_factor, predict, ranks_of
from hpc_parallel.planning.hardware import Hardware, Link

INSIDE, ACROSS = "inside a node", "across nodes"
_SIZE_BYTES = 2**30  # any size: the fit is a straight line


def with_measured_links(hardware: Hardware, machine: MachineConfig) -> tuple[Hardware, list[str]]:
    """Returns `hardware` with the links that the profile has, and a name for each of them.

    A profile has the time of a whole collective. An all-reduce takes 2 (n - 1) steps of a ring inside a node,
    and one step for each doubling of the nodes across nodes, as in `group_times.py`. Across nodes, each rank
    of a node is in a separate group, and all groups work at the same time. The profile has the rate of one
    group, so the rate of a node's adapters is the sum over its groups.
    """
    node, network, measured = hardware.node, hardware.network, []
    if link := _link(machine, INSIDE, "all_reduce", steps=lambda ranks: 2 * (ranks - 1)):
        node = replace(node, collective=link)
        measured.append(f"all_reduce {INSIDE}")
    if link := _link(machine, INSIDE, "send_recv", steps=lambda ranks: 1):
        node = replace(node, send=link)
        measured.append(f"send_recv {INSIDE}")
    if link := _link(machine, ACROSS, "all_reduce", steps=math.log2):
        groups = ranks_of(machine, INSIDE) or node.devices
        rate = groups * link.bytes_per_s
        network = replace(network, latency_s=link.latency_s, bytes_per_s=rate, share=1.0)
        measured.append(f"all_reduce {ACROSS}")
    return replace(hardware, node=node, network=network), measured


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
