"""The fabric that connects this host with others, and the variables with which NCCL and libfabric use it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_parallel.config.fabric_kinds import AUTO, EFA, INFINIBAND, ROCE, SLINGSHOT, TCP

SYSFS = Path("/sys")
ROCE_V2 = "RoCE v2"
IPV4 = "0000:0000:0000:0000:0000:ffff:"  # how the GID of an IPv4 address begins


@dataclass(frozen=True)
class Port:
    """An active RDMA port. link: InfiniBand or Ethernet; folder: where sysfs describes it."""

    device: str
    number: str
    link: str
    folder: Path

    def __str__(self) -> str:
        return f"{self.device}:{self.number}"


@dataclass(frozen=True)
class FabricDevices:
    """The devices of this host that /sys lists."""

    ports: Sequence[Port]  # without EFA's ports
    efa: Sequence[str]
    slingshot: Sequence[str]  # network interfaces

    @property
    def kind(self) -> str:
        """The fastest kind for which there is a device."""
        if self.slingshot:
            return SLINGSHOT
        if self.efa:
            return EFA
        links = {port.link for port in self.ports}
        return INFINIBAND if "InfiniBand" in links else ROCE if links else TCP

    def describe(self, kind: str) -> str:
        """The devices of a kind, or `no device`."""
        names: Mapping[str, Sequence[object]] = {
            SLINGSHOT: self.slingshot,
            EFA: self.efa,
            INFINIBAND: [port for port in self.ports if port.link == "InfiniBand"],
            ROCE: [port for port in self.ports if port.link != "InfiniBand"],
        }
        return ", ".join(map(str, names.get(kind, ()))) or "no device"


def fabric_devices(sysfs: Path = SYSFS) -> FabricDevices:
    """Read the devices; a file that can't be read counts as missing."""
    ports: list[Port] = []
    efa: list[str] = []
    for device in _entries(sysfs / "class" / "infiniband"):
        if _driver(device) == "efa":
            efa.append(device.name)
        else:
            ports += _active_ports(device)
    interfaces = _entries(sysfs / "class" / "net")
    # Older Slingshot networks name Mellanox interfaces hsn too; these are RoCE.
    slingshot = [
        path.name for path in interfaces
        if path.name.startswith("hsn") and not _driver(path).startswith("mlx")
    ]  # fmt: skip
    return FabricDevices(ports, efa, slingshot)


def set_fabric(
    kind: str, devices: FabricDevices, environment: MutableMapping[str, str], *, nccl: bool, one_machine: bool
) -> dict[str, str]:
    """Set the unset variables that the fabric needs; returns the reason for each that was set.

    Call this before the first collective: the libraries read the variables once.

    kind: `auto` or the kind that the site expects; nccl: whether NCCL will be used.
    """
    if one_machine:
        return {}
    kind = devices.kind if kind == AUTO else kind
    reasons = {}
    for name, value, reason in _fabric_variables(kind, devices):
        if name not in environment and (nccl or name.startswith("GLOO_")):
            environment[name] = value
            reasons[name] = f"fabric {kind}: {reason}"
    return reasons


def _fabric_variables(kind: str, devices: FabricDevices) -> Iterator[tuple[str, str, str]]:
    """Yields name, value and reason."""
    if kind in (INFINIBAND, ROCE):
        ports = [port for port in devices.ports if (port.link == "InfiniBand") == (kind == INFINIBAND)]
        if ports:
            yield "NCCL_IB_HCA", "=" + ",".join(map(str, ports)), "the active ports of this kind"
        indices = {_index_of(port) for port in ports} if kind == ROCE else set()
        if len(indices) == 1 and (index := indices.pop()) is not None:
            yield "NCCL_IB_GID_INDEX", index, "RoCE v2 over IPv4 on every port"
    elif kind == SLINGSHOT:
        yield "NCCL_SOCKET_IFNAME", "hsn", "the interfaces of Slingshot"
        if devices.slingshot:
            yield "GLOO_SOCKET_IFNAME", devices.slingshot[0], "the first interface of Slingshot"
        yield "NCCL_CROSS_NIC", "1", "rings may use several network cards"
        yield "NCCL_NET_GDR_LEVEL", "PHB", "GPUDirect RDMA inside a NUMA node"
        yield "FI_CXI_DISABLE_HOST_REGISTER", "1", "avoids a deadlock with CUDA"
        yield "FI_MR_CACHE_MONITOR", "userfaultfd", "avoids a deadlock with CUDA"
        yield "FI_CXI_DEFAULT_CQ_SIZE", "131072", "the default overflows with many ranks"
    elif kind == EFA:
        yield "FI_EFA_USE_HUGE_PAGE", "0", "huge pages break processes that fork, such as data loaders"
    elif kind == TCP:
        yield "NCCL_SOCKET_IFNAME", "^docker,lo", "other hosts can't reach these interfaces"


def _index_of(port: Port) -> str | None:
    """The index of the GID of RoCE v2 over IPv4."""
    types = _entries(port.folder / "gid_attrs" / "types")
    for path in sorted(types, key=lambda path: int(path.name) if path.name.isdecimal() else 0):
        if _text(path) == ROCE_V2 and _text(port.folder / "gids" / path.name).startswith(IPV4):
            return path.name
    return None


def _active_ports(device: Path) -> Iterator[Port]:
    for folder in _entries(device / "ports"):
        if "ACTIVE" in _text(folder / "state"):
            yield Port(device.name, folder.name, _text(folder / "link_layer") or "InfiniBand", folder)


def _driver(device: Path) -> str:
    """The kernel module of a device; empty for a virtual one."""
    try:
        return (device / "device" / "driver").resolve(strict=True).name
    except OSError:
        return ""


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
