"""Compare the times of `task=collectives` with those that a machine profile of another day predicts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpc_parallel.config.site_schema import MachineConfig
from hpc_parallel.planning.collective_times import FITTED_DTYPE, PredictedTime, predict, ranks_of
from hpc_parallel.record.collectives_file import CollectiveRow, Rows

SLOWER = 1.5  # times the prediction, beyond the mean error of its fit


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
    predictions = [_prediction(machine, row) for row in rows]
    warnings = [*_missing(rows, machine), *_slower(rows, predictions, title=_title(machine))]
    return MachineComparison([None if p is None else p.time_s for p in predictions], warnings)


def _prediction(machine: MachineConfig, row: CollectiveRow) -> PredictedTime | None:
    if row.dtype != FITTED_DTYPE:
        return None
    return predict(
        machine, group=row.group, operation=row.operation, ranks=row.ranks,
        size_bytes=row.size_bytes,
    )  # fmt: skip


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
