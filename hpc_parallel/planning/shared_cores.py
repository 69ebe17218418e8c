"""Devices that share processor cores: the hosts of a test cluster, or the processes of one machine.

Cores are shared fairly and without loss: of n processes that compute at the same time on c cores, each gets
min(1, c / n) of a core. Bytes on a wire need no core, but the copies to and from it do.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from hpc_parallel.planning.hardware import Hardware, Host, Link


@dataclass(frozen=True)
class Loads:
    """The hardware as a device sees it: alone, while its pipeline stage computes, while all compute."""

    alone: Hardware
    stage: Hardware
    all: Hardware


def contended(hardware: Hardware, *, devices: float) -> Hardware:
    """The hardware as each of `devices` sees it while all of them compute."""
    if hardware.shared_cores is None or devices <= hardware.shared_cores:
        return hardware
    turns = devices / hardware.shared_cores
    device, node, network = hardware.device, hardware.node, hardware.network
    peaks = {precision: rate / turns for precision, rate in device.peak_flops.items()}
    rate = device.memory_bytes_per_s / turns
    return replace(
        hardware,
        device=replace(device, peak_flops=peaks, memory_bytes_per_s=rate),
        traffic=replace(hardware.traffic, kernel_s=hardware.traffic.kernel_s * turns),
        host=_slower_host(hardware.host, turns),
        node=replace(node, collective=_slower(node.collective, turns), send=_slower(node.send, turns)),
        network=replace(network, latency_s=network.latency_s * turns),
    )


def pipelines_at_once(hardware: Hardware, *, devices: float) -> float | None:
    """How many ranks of a pipeline compute at full speed at the same time; None if all do.

    devices: the number of devices of each rank. With more devices than cores the result is one, and
    `contended` has made the devices slower.
    """
    return None if hardware.shared_cores is None else max(1.0, hardware.shared_cores / devices)


def _slower(link: Link, turns: float) -> Link:
    return Link(link.latency_s * turns, link.bytes_per_s / turns)


def _slower_host(host: Host, turns: float) -> Host:
    names = [field.name for field in fields(host) if field.name.endswith("_s")]
    return replace(host, **{name: getattr(host, name) * turns for name in names})
