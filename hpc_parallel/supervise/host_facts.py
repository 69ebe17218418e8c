"""What one host says of itself at the start of a run: versions, disks, clock, and the health of its GPUs."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpc_parallel.record.provenance import installed_packages

WRITTEN_BYTES = 4 * 2**20  # to each folder, with fsync
DRIVER = Path("/proc/driver/nvidia/version")
_DRIVER_VERSION = re.compile(r"Kernel Module(?: for \S+)?\s+(\S+)")
# NVML's reasons for low clocks that mean trouble.
THROTTLES = {0x8: "hardware slowdown", 0x20: "too hot", 0x40: "too hot", 0x80: "power brake"}


def host_facts(
    *, folders: Mapping[str, Path], versions: Mapping[str, str | None], nvml: Any
) -> dict[str, Any]:
    """Facts as JSON: `versions` (with the driver and a digest of all packages), `disks`, `gpus`.

    folders: purpose -> folder that must be writable; versions: of torch and others; nvml: pynvml or None.
    """
    return {
        "versions": {**versions, "driver": driver_version(), "packages": packages_digest()},
        "disks": {purpose: disk(folder) for purpose, folder in folders.items()},
        "gpus": gpus(nvml),
    }


def driver_version(path: Path = DRIVER) -> str | None:
    """The version of NVIDIA's kernel module; None without one."""
    with suppress(OSError):
        if found := _DRIVER_VERSION.search(path.read_text(errors="replace")):
            return found[1]
    return None


def packages_digest() -> str:
    """The same on hosts whose Python finds the same versions of all packages."""
    return hashlib.sha256(json.dumps(installed_packages()).encode()).hexdigest()[:16]


def disk(folder: Path) -> dict[str, Any]:
    """`free_bytes`, `write_s` (of WRITTEN_BYTES) and `write_bytes_per_s` of a folder, or `error`."""
    try:
        status = os.statvfs(folder)
        began = time.perf_counter()
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(WRITTEN_BYTES))
            file.flush()
            os.fsync(file.fileno())
        took_s = time.perf_counter() - began
    except OSError as error:
        return {"folder": str(folder), "error": error.strerror or str(error)}
    free = status.f_bavail * status.f_frsize
    return {
        "folder": str(folder),
        "free_bytes": free,
        "write_s": took_s,
        "write_bytes_per_s": WRITTEN_BYTES / took_s,
    }


def gpus(nvml: Any) -> list[dict[str, Any]]:
    """`uuid`, `uncorrected_errors`, `throttled`, `bad_rows`, `processes` of each GPU; empty without NVML."""
    if nvml is None:
        return []
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:
        return []
    return [_gpu(nvml, handle) for handle in handles]


def _gpu(nvml: Any, handle: Any) -> dict[str, Any]:
    """A figure that the device does not have is None."""

    def asked(function: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, function)(handle, *arguments)
        except nvml.NVMLError:
            return None

    uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    rows = asked("nvmlDeviceGetRemappedRows")  # corrected, uncorrected, pending, failed
    reasons = asked("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
    uuid = asked("nvmlDeviceGetUUID")
    return {
        "uuid": uuid.decode() if isinstance(uuid, bytes) else uuid,
        "uncorrected_errors": asked("nvmlDeviceGetTotalEccErrors", *uncorrected),
        "throttled": sorted({text for bit, text in THROTTLES.items() if reasons & bit}),
        "bad_rows": rows and bool(rows[2] or rows[3]),
        "processes": [process.pid for process in asked("nvmlDeviceGetComputeRunningProcesses") or []],
    }


def different_packages(by_host: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str | None]]:
    """Package -> host -> version (None: missing), for packages that differ between the hosts."""
    names: Iterable[str] = sorted({name for packages in by_host.values() for name in packages})
    table = {name: {host: packages.get(name) for host, packages in by_host.items()} for name in names}
    return {name: versions for name, versions in table.items() if len(set(versions.values())) > 1}
