"""The facts of one host at the start of a run: versions, disks, clock, and the health of its GPUs."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpc_parallel.machine.xids import bus_address, logged_xids
from hpc_parallel.record.provenance import installed_packages

WRITTEN_BYTES, CACHE_WRITTEN_BYTES = 4 * 2**20, 2**20  # to each folder, with fsync
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "HF_HOME", "XDG_CACHE_HOME")
DRIVER = Path("/proc/driver/nvidia/version")
_DRIVER_VERSION = re.compile(r"Kernel Module(?: for \S+)?\s+(\S+)")
# NVML's reasons for low clocks that mean trouble.
THROTTLES = {0x8: "hardware slowdown", 0x20: "too hot", 0x40: "too hot", 0x80: "power brake"}


def host_facts(
    *,
    folders: Mapping[str, Path],
    caches: Mapping[str, Path],
    versions: Mapping[str, str | None],
    nvml: Any,
) -> dict[str, Any]:
    """Facts as JSON: `versions` (with the driver, and a digest of all packages), `cpu`, `disks`, ...

    folders: purpose -> folder that must be writable. caches: the result of `cache_folders`. versions: the
    versions of torch and other packages. nvml: pynvml or None.
    """
    no_log = {"kernel_log": "not read: no NVIDIA GPU is used, or pynvml is missing", "seen": []}
    xids: dict[str, Any] = logged_xids() if nvml is not None else no_log
    packages = hashlib.sha256(json.dumps(installed_packages()).encode()).hexdigest()[:16]
    return {
        "versions": {**versions, "driver": driver_version(), "packages": packages},
        "cpu": cpu_facts(),
        "disks": {
            **{purpose: {**disk(folder), "cache": False} for purpose, folder in folders.items()},
            **{variable: {**cache_disk(folder), "cache": True} for variable, folder in caches.items()},
        },
        "gpus": [
            {**gpu, "xids": [xid for xid in xids["seen"] if xid["bus"] == gpu["bus"]]} for gpu in gpus(nvml)
        ],
        "xids": xids,
    }


def driver_version(path: Path = DRIVER) -> str | None:
    """The version of NVIDIA's kernel module; None without one."""
    with suppress(OSError):
        if match := _DRIVER_VERSION.search(path.read_text(errors="replace")):
            return match[1]
    return None


def cache_folders(environment: Mapping[str, str], *, other_than: Iterable[Path]) -> dict[str, Path]:
    """Variable -> folder, for each cache variable that names a folder outside of `other_than`."""
    listed = {Path(os.path.realpath(folder)) for folder in other_than}
    folders = {}
    for variable in CACHES:
        folder = os.path.expanduser(environment.get(variable, ""))
        real = Path(os.path.realpath(folder))
        if folder and not any(real.is_relative_to(other) for other in listed):
            listed.add(real)
            folders[variable] = Path(folder)
    return folders


def cache_disk(folder: Path) -> dict[str, Any]:
    """As `disk`. Libraries create a missing cache folder, so its parent is measured instead."""
    # Path.exists raises PermissionError below a folder that this user may not read.
    existing = next((path for path in (folder, *folder.parents) if os.path.exists(path)), folder)
    return {**disk(existing, size_bytes=CACHE_WRITTEN_BYTES), "folder": str(folder)}


def disk(folder: Path, *, size_bytes: int = WRITTEN_BYTES) -> dict[str, Any]:
    """`free_bytes`, `write_s` (to write `size_bytes`) and `write_bytes_per_s` of a folder, or `error`."""
    try:
        status = os.statvfs(folder)
        began = time.perf_counter()
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(size_bytes))
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
        "write_bytes_per_s": size_bytes / took_s,
    }


def gpus(nvml: Any) -> list[dict[str, Any]]:
    """`uuid`, `bus`, `uncorrected_errors`, `throttled`, `bad_rows`, `processes` of each GPU.

    Empty without NVML; a GPU that NVML has lost is left out.
    """
    if nvml is None:
        return []
    handles = []
    with suppress(nvml.NVMLError):
        nvml.nvmlInit()
        for index in range(nvml.nvmlDeviceGetCount()):
            with suppress(nvml.NVMLError):
                handles.append(nvml.nvmlDeviceGetHandleByIndex(index))
    return [_gpu(nvml, handle) for handle in handles]


def _gpu(nvml: Any, handle: Any) -> dict[str, Any]:
    """The facts of one GPU. A figure that the device does not have is None."""

    def query(function: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, function)(handle, *arguments)
        except nvml.NVMLError:
            return None

    uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    rows = query("nvmlDeviceGetRemappedRows")  # corrected, uncorrected, pending, failed
    reasons = query("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
    uuid, pci = query("nvmlDeviceGetUUID"), query("nvmlDeviceGetPciInfo")
    bus = pci.busId if pci is not None else ""
    return {
        "uuid": uuid.decode() if isinstance(uuid, bytes) else uuid,
        "bus": bus_address(bus.decode() if isinstance(bus, bytes) else bus),
        "uncorrected_errors": query("nvmlDeviceGetTotalEccErrors", *uncorrected),
        "throttled": sorted({text for bit, text in THROTTLES.items() if reasons & bit}),
        "bad_rows": rows and bool(rows[2] or rows[3]),
        "processes": [process.pid for process in query("nvmlDeviceGetComputeRunningProcesses") or []],
    }


def different_packages(by_host: Mapping[str, Mapping[str, str | None]]) -> dict[str, dict[str, str | None]]:
    """Package -> host -> version (None: missing), for packages that differ between the hosts."""
    names: Iterable[str] = sorted({name for packages in by_host.values() for name in packages})
    table = {name: {host: packages.get(name) for host, packages in by_host.items()} for name in names}
    return {name: versions for name, versions in table.items() if len(set(versions.values())) > 1}


CPUS, MEMORY = Path("/proc/cpuinfo"), Path("/proc/meminfo")


def cpu_facts(*, cpus: Path = CPUS, memory: Path = MEMORY) -> dict[str, Any]:
    """`model`, `cores` (hardware threads) of all CPUs, `total_bytes` and `available_bytes` of memory.

    A value that Linux does not report is None.
    """
    sizes = _values(memory)
    return {
        "model": _model(_values(cpus)),
        "cores": os.cpu_count(),
        "total_bytes": _bytes(sizes.get("MemTotal")),
        "available_bytes": _bytes(sizes.get("MemAvailable")),
    }


def _model(values: dict[str, str]) -> str:
    """The model name. ARM CPUs have none and get their architecture, implementer number and part number."""
    if name := values.get("model name"):
        return name
    numbers = [values[key] for key in ("CPU implementer", "CPU part") if key in values]
    return " ".join([platform.machine(), *numbers])


def _values(path: Path) -> dict[str, str]:
    """The first value of each name in lines `name : value`; empty if the file can't be read."""
    values: dict[str, str] = {}
    with suppress(OSError):
        for line in path.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            values.setdefault(name.strip(), value.strip())
    return values


def _bytes(value: str | None) -> int | None:
    """`16266796 kB` in bytes."""
    number, _, unit = (value or "").partition(" ")
    return int(number) * 1024 if number.isdecimal() and unit == "kB" else None
