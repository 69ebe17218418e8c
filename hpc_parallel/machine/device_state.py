"""How busy, full and hot a GPU is."""

from __future__ import annotations

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
