"""Predict the time of a collective from a machine profile, the `machine.yaml` of `task=collectives`.

time = latency + bytes on the bus / bandwidth (the alpha-beta model; Hockney 1994), where the bytes on the bus
are the size times the bus factor of NVIDIA's nccl-tests (PERFORMANCE.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hpc_parallel.config.site_schema import MachineConfig
from hpc_parallel.record.values import integer, number, table

FITTED_DTYPE = "float32"  # the times in a profile are those of this type

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
