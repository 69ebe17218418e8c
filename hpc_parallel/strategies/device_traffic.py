"""Bytes between the devices of one process, which no collective carries (profiling/traffic.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class DeviceTraffic:
    """Bytes that one device has sent to others, and received from them, in training so far."""

    sent_bytes: int = 0
    received_bytes: int = 0


def move(count: int, *, source: DeviceTraffic, target: DeviceTraffic) -> None:
    """Note `count` bytes on both their ends."""
    source.sent_bytes += count
    target.received_bytes += count


def figures(devices: Sequence[DeviceTraffic], *, steps: int) -> dict[str, Any]:
    """Bytes of one step for `summary.json`, from the counts of all devices over `steps` steps."""
    moved = sum(device.sent_bytes for device in devices) / steps
    return {
        "traffic_bytes": moved,
        "busiest_rank_traffic_bytes": max(d.sent_bytes + d.received_bytes for d in devices) / steps,
        "traffic": {"copy": moved},
    }


def ring_all_reduce(*, weights_bytes: int, replicas: int) -> dict[str, float]:
    """What a ring all-reduce of the gradients over the devices that compute would move instead.

    Each of n sends and receives 2(n-1)/n of the weights (Patarasuk and Yuan 2009).
    """
    sent = 2 * (replicas - 1) / replicas * weights_bytes
    return {"traffic_bytes": replicas * sent, "busiest_rank_traffic_bytes": 2 * sent}
