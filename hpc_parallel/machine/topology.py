"""How the GPUs and network cards of one host are connected: NVLink by NVML, PCIe and NUMA by sysfs.

The words are those of `nvidia-smi topo -m`:
NV4: four NVLinks; PIX: one PCIe switch; PXB: several PCIe switches; PHB: through the CPU's PCIe host bridge;
NODE: between host bridges of one NUMA node; SYS: between NUMA nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_parallel.machine.fabric_kind import SYSFS

SELF, SWITCH, SWITCHES, HOST, NODE, SYSTEM, UNKNOWN = "X", "PIX", "PXB", "PHB", "NODE", "SYS", "?"
_TO_A_SWITCH = "a switch"  # NVSwitch: every GPU reaches every other with all its links


@dataclass(frozen=True)
class MachinePart:
    """A GPU or a network card.

    path: the PCIe bridges above it and itself, from the host bridge; empty if unknown. nvlinks: bus
    address of the other end (or _TO_A_SWITCH) -> links.
    """

    name: str
    model: str
    bus: str
    numa: int | None
    path: tuple[str, ...]
    nvlinks: Mapping[str, int] = field(default_factory=dict)


def topology(*, nvml: Any = None, sysfs: Path = SYSFS) -> dict[str, Any]:
    """The parts of this host, and the connection between each two parts, for `environment.json`.

    nvml: the module pynvml; None: no GPUs are listed.
    """
    parts = [*_gpus(nvml, sysfs=sysfs), *_network_cards(sysfs)]
    return {
        "parts": [{"name": part.name, "model": part.model, "numa": part.numa} for part in parts],
        "links": [[connection(one, other) for other in parts] for one in parts],
    }


def alike(by_host: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Each different topology once, with the names of its `hosts`."""
    shapes: list[dict[str, Any]] = []
    for host, shape in by_host.items():
        same_shape = next((other for other in shapes if {**shape, "hosts": other["hosts"]} == other), None)
        if same_shape is None:
            shapes.append({**shape, "hosts": [host]})
        else:
            same_shape["hosts"].append(host)
    return shapes


def nvml_module() -> Any:
    """The module pynvml of nvidia-ml-py; None if it is not installed."""
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def connection(one: MachinePart, other: MachinePart) -> str:
    """The word for the shortest way between two parts."""
    if one.name == other.name:
        return SELF
    direct = one.nvlinks.get(other.bus, 0)
    if links := direct or min(one.nvlinks.get(_TO_A_SWITCH, 0), other.nvlinks.get(_TO_A_SWITCH, 0)):
        return f"NV{links}"
    if not one.path or not other.path:
        return UNKNOWN
    if one.path[0] != other.path[0]:
        both_known = one.numa is not None and other.numa is not None
        return (NODE if one.numa == other.numa else SYSTEM) if both_known else SYSTEM
    shared = sum(1 for a, b in zip(one.path, other.path, strict=False) if a == b)
    # A path is (host bridge, root port, switch, ..., device): two parts of one switch share the root port.
    if shared == 1:
        return HOST
    between = len(one.path) + len(other.path) - 2 * shared - 2  # bridges below the shared bridges
    return SWITCH if between <= 2 else SWITCHES


def _gpus(nvml: Any, *, sysfs: Path) -> list[MachinePart]:
    if nvml is None:
        return []
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return [_gpu(nvml, handle, index=index, sysfs=sysfs) for index, handle in enumerate(handles)]
    except nvml.NVMLError:
        return []


def _gpu(nvml: Any, handle: Any, *, index: int, sysfs: Path) -> MachinePart:
    bus = _bus(nvml.nvmlDeviceGetPciInfo(handle).busId)
    folder = sysfs / "bus" / "pci" / "devices" / bus
    return MachinePart(
        f"GPU{index}", _text(nvml.nvmlDeviceGetName(handle)), bus, _numa(folder), _path(folder),
        _nvlinks(nvml, handle),
    )  # fmt: skip


def _nvlinks(nvml: Any, handle: Any) -> dict[str, int]:
    links: dict[str, int] = {}
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        with suppress(nvml.NVMLError):  # a link that the device does not have
            if nvml.nvmlDeviceGetNvLinkState(handle, link) != nvml.NVML_FEATURE_ENABLED:
                continue
            kind = nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)
            switch = kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
            end = _TO_A_SWITCH if switch else _bus(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)
            links[end] = links.get(end, 0) + 1
    return links


def _network_cards(sysfs: Path) -> list[MachinePart]:
    """RDMA devices, and the network interfaces of other PCIe devices."""
    parts: dict[Path, MachinePart] = {}
    for group in ("infiniband", "net"):
        folder = sysfs / "class" / group
        for entry in sorted(folder.iterdir()) if folder.is_dir() else []:
            device = (entry / "device").resolve()
            if (entry / "device").exists() and device not in parts and _path(device):
                parts[device] = MachinePart(entry.name, "", device.name, _numa(device), _path(device))
    return list(parts.values())


def _path(device: Path) -> tuple[str, ...]:
    """`pci0000:17`, `0000:17:01.0`, ...: the host bridge, the bridges below it and the device."""
    names = device.resolve().parts
    roots = [at for at, name in enumerate(names) if name.startswith("pci") and ":" in name]
    return tuple(names[roots[0] :]) if roots else ()


def _numa(device: Path) -> int | None:
    """The NUMA node; None if the machine has only one node (-1)."""
    try:
        node = int((device / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _bus(address: Any) -> str:
    """NVML writes the domain with eight digits, sysfs with four."""
    domain, _, rest = _text(address).lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
