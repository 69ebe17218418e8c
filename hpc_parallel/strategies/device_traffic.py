"""Bytes between the devices of one process, which no collective sends (profiling/traffic.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class DeviceTraffic:
    """Bytes that one device has sent to other devices and received from them in training so far."""

    sent_bytes: int = 0
    received_bytes: int = 0


def move(count_bytes: int, *, source: DeviceTraffic, target: DeviceTraffic) -> None:
    """Count bytes that `source` sends to `target`."""
    source.sent_bytes += count_bytes
    target.received_bytes += count_bytes


def figures(devices: Sequence[DeviceTraffic], *, steps: int) -> dict[str, Any]:
    """Returns the bytes of one step for `summary.json`, from the counts of all devices over `steps` steps."""
    sent_bytes = sum(device.sent_bytes for device in devices) / steps
    return {
        "traffic_bytes": sent_bytes,
        "busiest_rank_traffic_bytes": max(d.sent_bytes + d.received_bytes for d in devices) / steps,
        "traffic": {"copy": sent_bytes},
    }


def ring_all_reduce(*, weights_bytes: int, replicas: int) -> dict[str, float]:
    """Returns the bytes that a ring all-reduce of the gradients over `replicas` devices would send instead.

    Each of n devices sends and receives 2(n-1)/n of the weights (Patarasuk and Yuan 2009).
    """
    sent_bytes = 2 * (replicas - 1) / replicas * weights_bytes
    return {"traffic_bytes": replicas * sent_bytes, "busiest_rank_traffic_bytes": 2 * sent_bytes}
