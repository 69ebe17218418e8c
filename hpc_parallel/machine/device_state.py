"""How busy, full and hot a GPU is, and what energy it uses."""

from __future__ import annotations

import math
from typing import Any


def device_state(nvml: Any, uuid: str | None) -> dict[str, float]:
    """`utilisation` (share of the last second), `memory_bytes`, `power_w` and `temperature_c`; empty on CPUs.

    nvml: the module pynvml, or None. A figure that the device does not have is left out.
    """
    if nvml is None or uuid is None:
        return {}
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError:
        return {}
    readings = {
        "utilisation": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
        "memory_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
        "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
    }
    values = {}
    for name, read in readings.items():
        try:
            values[name] = read()
        except nvml.NVMLError:
            continue
    return values


class EnergyCounter:
    """The energy that a GPU has used since this object was made, by NVML's counter of its total energy.

    The counter begins anew when the driver is loaded. Then what it shows counts, and what was used since the
    reading before is lost.
    """

    def __init__(self, nvml: Any, uuid: str | None) -> None:
        """nvml: the module pynvml, or None."""
        self._nvml, self._uuid = nvml, uuid
        self._joules, self._before = 0.0, self._read()

    def joules(self) -> float:
        """NaN if the device has no counter (older than Volta, a part of a GPU, a CPU)."""
        now = self._read()
        if math.isnan(self._before):
            return math.nan
        if not math.isnan(now):
            self._joules += now - self._before if now >= self._before else now
            self._before = now
        return self._joules

    def _read(self) -> float:
        if self._nvml is None or self._uuid is None:
            return math.nan
        try:
            self._nvml.nvmlInit()
            handle = self._nvml.nvmlDeviceGetHandleByUUID(self._uuid)
            return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1000  # mJ
        except self._nvml.NVMLError:
            return math.nan
