"""The machine profile of `task=collectives`, and times of another day compared with it.

A profile has the latency and the bandwidth of each collective, fitted to its times. The model is that of
`planning/collective_times.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpc_parallel.config.site_schema import MachineConfig
from hpc_parallel.planning.collective_times import FITTED_DTYPE, PredictedTime, predict, ranks_of
from hpc_parallel.record.collectives_file import Rows

SLOWER = 1.5  # times the prediction, beyond the mean error of its fit


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
    size, time_s = np.array(points, dtype=float).T
    weight = 1 / time_s**2
    slope, latency_s = np.polyfit(size, time_s, deg=1, w=1 / time_s)
    if latency_s < 0:
        latency_s, slope = 0.0, weight @ (size * time_s) / (weight @ size**2)
    elif slope < 0:
        latency_s, slope = weight @ time_s / weight.sum(), 0.0
    error = np.abs((latency_s + slope * size) / time_s - 1).mean()
    return FittedLink(float(latency_s), float(1 / slope) if slope > 0 else None, float(error))


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


@dataclass(frozen=True)
class MachineComparison:
    """predicted_s: seconds for each row, None where the profile says nothing; warnings: lines for people."""

    predicted_s: list[float | None]
    warnings: list[str]


def compare(rows: Rows, *, machine: MachineConfig, device_type: str) -> MachineComparison:
    """Compare the rows of `collectives.json` with the profile. Without a profile, nothing is predicted."""
    if not machine.collectives:
        return MachineComparison([None] * len(rows), [])
    if machine.device_type not in (None, device_type):
        reason = f"it was measured on {machine.device_type}, and this run uses {device_type}"
        return MachineComparison([None] * len(rows), [f"not compared with {_title(machine)}: {reason}"])
    predictions = [
        predict(machine, group=row.group, operation=row.operation, ranks=row.ranks, size_bytes=row.size_bytes)
        if row.dtype == FITTED_DTYPE
        else None
        for row in rows
    ]
    warnings = [*_missing(rows, machine), *_slower(rows, predictions, title=_title(machine))]
    return MachineComparison([None if p is None else p.time_s for p in predictions], warnings)


def _title(machine: MachineConfig) -> str:
    origin = ", ".join(filter(None, (machine.site, machine.measured)))
    return f"the machine profile ({origin})" if origin else "the machine profile"


def _missing(rows: Rows, machine: MachineConfig) -> Iterator[str]:
    """Yields a line for each group that can't be compared."""
    for group, ranks in {row.group: row.ranks for row in rows}.items():
        if (profile_ranks := ranks_of(machine, group)) is None:
            yield f"{group}: this group is not in {_title(machine)}"
        elif profile_ranks != ranks:
            yield f"{group}: {ranks} ranks, and {profile_ranks} in {_title(machine)}, so it is not compared"


def _slower(rows: Rows, predictions: Sequence[PredictedTime | None], *, title: str) -> Iterator[str]:
    """Yields a line for each collective of each group that takes much longer than predicted.

    Small sizes, whose time is mostly latency, and large sizes are judged separately, because a slow link
    slows only large sizes. The median size counts, because single sizes are noisy.
    """
    halves: dict[tuple[str, str], dict[bool, list[tuple[float, int]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for index, (row, prediction) in enumerate(zip(rows, predictions, strict=True)):
        if prediction is not None and prediction.time_s > 0:
            is_large = prediction.transfer_s > prediction.latency_s
            ratio = row.time_s / prediction.time_s / (1 + prediction.error)
            halves[row.group, row.operation][is_large].append((ratio, index))
    for (group, operation), by_half in halves.items():
        ratio, index = max(sorted(half)[(len(half) - 1) // 2] for half in by_half.values())
        if (prediction := predictions[index]) is not None and ratio > SLOWER:
            row = rows[index]
            factor = row.time_s / prediction.time_s
            times = f"{row.time_s * 1e3:.3f} ms for {row.size_bytes:,} bytes"
            yield (
                f"{operation}, {group} ({row.ranks} ranks): {factor:.1f} times as long as {title} says, "
                f"{times} instead of {prediction.time_s * 1e3:.3f}"
            )
