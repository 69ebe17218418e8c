"""The machine profile of `task=collectives`: latency and bandwidth of each collective, fitted to its times.

The model is that of `planning/collective_times.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpc_parallel.planning.collective_times import FITTED_DTYPE
from hpc_parallel.record.collectives_file import Rows


@dataclass(frozen=True)
class FittedLink:
    """latency_s + bytes / bandwidth. `error`: the mean relative error of the fit."""

    latency_s: float
    bandwidth_bytes_per_s: float | None  # None if the time does not grow with the bytes
    error: float


def fit_link(points: Sequence[tuple[float, float]]) -> FittedLink | None:
    """Fit `points` (bytes on the bus, seconds); None for fewer than two sizes.

    The fit minimises the sum of squared relative errors, so that small and large sizes count alike. Neither
    latency nor bandwidth is negative.
    """
    if len({size for size, _ in points}) < 2:
        return None
    weighted = [(1 / time_s**2, size, time_s) for size, time_s in points]
    total = sum(w for w, _, _ in weighted)
    by_size = sum(w * size for w, size, _ in weighted)
    by_square = sum(w * size**2 for w, size, _ in weighted)
    by_time = sum(w * time_s for w, _, time_s in weighted)
    by_both = sum(w * size * time_s for w, size, time_s in weighted)
    slope = (total * by_both - by_size * by_time) / (total * by_square - by_size**2)
    latency_s = (by_time - slope * by_size) / total
    if latency_s < 0:
        latency_s, slope = 0.0, by_both / by_square
    elif slope < 0:
        latency_s, slope = by_time / total, 0.0
    errors = [abs(latency_s + slope * size - time_s) / time_s for size, time_s in points]
    return FittedLink(latency_s, 1 / slope if slope > 0 else None, sum(errors) / len(errors))


def machine_profile(rows: Rows, *, site: str, device_type: str, measured: str) -> dict[str, Any]:
    """The content of `machine.yaml`: group -> ranks, other names, and the fit of each operation."""
    points: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    ranks: dict[str, int] = {}
    for row in rows:
        if row.dtype == FITTED_DTYPE:
            on_bus = row.busbw_bytes_per_s * row.time_s
            points[row.group, row.operation].append((on_bus, row.time_s))
            ranks[row.group] = row.ranks
    groups: dict[str, dict[str, Any]] = {name: {"ranks": count} for name, count in ranks.items()}
    for row in rows:
        if row.also and row.group in groups:
            groups[row.group]["also"] = list(row.also)  # the same ranks are an axis too
    for (group, operation), times in points.items():
        if (link := fit_link(times)) is not None:
            groups[group][operation] = {
                "latency_s": link.latency_s,
                "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s,
                "fit_error": link.error,
            }
    return {"site": site, "device_type": device_type, "measured": measured, "collectives": groups}
