"""A stand-in for pynvml: it has the functions that a test gives, and raises NVMLError in all others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class NVMLError(Exception):
    pass


class Nvml:
    """A machine with `count` GPUs; the handle of a GPU is its index."""

    NVMLError = NVMLError
    NVML_NVLINK_MAX_LINKS, NVML_FEATURE_ENABLED, NVML_NVLINK_DEVICE_TYPE_SWITCH = 18, 1, 2
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC, NVML_TEMPERATURE_GPU = 1, 0, 0
    nvmlEventTypeXidCriticalError = 8  # noqa: N815

    def __init__(self, count: int, **functions: Callable[..., Any]) -> None:
        known: dict[str, Callable[..., Any]] = {
            "nvmlInit": lambda: None,
            "nvmlDeviceGetCount": lambda: count,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
        }
        vars(self).update({**known, **functions})

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            raise AttributeError(name)
        return not_supported


def not_supported(*_: Any) -> Any:
    raise NVMLError("Not Supported")
