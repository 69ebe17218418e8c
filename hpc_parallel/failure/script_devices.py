"""Measures the use of the device, the CPUs and the memory by one rank of a script, in the rank's parent."""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import psutil

from hpc_parallel.failure.process_tree import tree_of
from hpc_parallel.machine.device_state import device_state
from hpc_parallel.machine.topology import nvml_module
from hpc_parallel.machine.world import World
from hpc_parallel.record.device_states import device_file
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_json

_EVERY = 10  # calls between two samples, each of which lists the processes of the host
_MEANS = ("utilisation", "power_w")  # the other figures are peaks


class DeviceWatch:
    """Keeps a file with the figures of a rank up to date.

    Call it from time to time while the script runs, and once after its end. `cpu_cores` is the CPU time per
    second of all processes of the rank. `resident_bytes` is the largest sum of their memory; shared pages
    count once for each process. With an NVIDIA GPU, the file also has the figures of `device_state`.
    """

    def __init__(
        self, folder: RunFolder, *, world: World, process: int, environment: Mapping[str, str]
    ) -> None:
        """environment: the variables of the script."""
        self._file, self._process = device_file(folder, rank=world.rank), process
        self._figures: dict[str, Any] = {"rank": world.rank, "host": world.host}
        self._nvml = nvml_module()
        self._uuid = None if self._nvml is None else gpu_of(environment, nvml=self._nvml)
        self._started = time.monotonic()
        self._calls, self._samples, self._cpu_s = 0, 0, 0.0

    def __call__(self, is_last: bool) -> None:
        self._calls += 1
        if is_last:  # the processes have ended, so use what Linux counted
            used = resource.getrusage(resource.RUSAGE_CHILDREN)
            self._keep(used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)
        elif self._calls % _EVERY == 1:
            self._keep(*_used_by_tree(self._process))
            self._samples += 1
            for key, value in device_state(self._nvml, self._uuid).items():
                before = self._figures.get(key, value)
                mean = before + (value - before) / self._samples
                self._figures[key] = mean if key in _MEANS else max(before, value)
        else:
            return
        write_json(self._file, self._figures)

    def _keep(self, cpu_s: float, resident_bytes: int) -> None:
        self._cpu_s = max(self._cpu_s, cpu_s)
        self._figures["cpu_cores"] = self._cpu_s / (time.monotonic() - self._started)
        self._figures["resident_bytes"] = max(resident_bytes, self._figures.get("resident_bytes", 0))


def gpu_of(environment: Mapping[str, str], *, nvml: Any) -> str | None:
    """The UUID of a rank's GPU: by torch's convention, the local rank is its index. None without a GPU."""
    with suppress(nvml.NVMLError, ValueError):
        nvml.nvmlInit()
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        numbers = [str(index) for index in range(nvml.nvmlDeviceGetCount())]
        names = numbers if visible is None else [name for name in visible.split(",") if name]
        local_rank = int(environment["LOCAL_RANK"])
        name = names[local_rank if local_rank < len(names) else 0] if names else None
        if name is None or not name.isdecimal():
            return name
        return str(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(int(name))))
    return None


def _used_by_tree(process: int) -> tuple[float, int]:
    """Seconds on CPUs, and bytes of resident memory, of a process and its descendants."""
    cpu_s, resident_bytes = 0.0, 0
    for member in tree_of(process):
        with suppress(psutil.Error):
            cpu_s += sum(member.cpu_times()[:4])  # its own, and of the children that have ended
            resident_bytes += member.memory_info().rss
    return cpu_s, resident_bytes
