"""What a process uses of its machine: the site's network variables, an interface, a device, threads."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import psutil

from hpc_parallel.supervise.world import World

RECORDED = ("NCCL_", "GLOO_", "FI_", "OMP_", "TORCH_NCCL_", "TORCH_FR_", "UCX_", "CUDA_VISIBLE_DEVICES")


class DeviceError(RuntimeError):
    """The device that was asked for is not here."""


def site_variables(settings: Mapping[str, Any], environment: MutableMapping[str, str]) -> dict[str, str]:
    """Set the site's variables where they are unset, and return all that bear on the network.

    settings: `cluster.environment`. To be called before the first collective and before the first
    use of a GPU, since the libraries read them once.
    """
    for name, value in settings.items():
        environment.setdefault(name, str(value).lower() if isinstance(value, bool) else str(value))
    return recorded(environment, also=settings)


def recorded(environment: Mapping[str, str], *, also: Iterable[str] = ()) -> dict[str, str]:
    """The effective network variables, sorted, for environment.json."""
    extra = set(also)
    names = sorted(name for name in environment if name.startswith(RECORDED) or name in extra)
    return {name: environment[name] for name in names}


def set_sockets(
    environment: MutableMapping[str, str], *, world: World, hosts: Iterable[str], suffix: str = ""
) -> str | None:
    """Set what is unset of the variables that say where gloo and NCCL listen, before the first group.

    On one machine both stay on loopback. Else GLOO_SOCKET_IFNAME becomes the interface that reaches the
    run's other hosts: gloo takes the address of this host's own name, which on Debian is 127.0.1.1 and
    elsewhere may be a management network. NCCL then looks at all interfaces itself. hosts: names of the
    run's hosts (`World.hosts` or `rendezvous.hosts`); suffix: `cluster.master_suffix`. Returns gloo's
    interface; None if none was found and gloo keeps its own choice.
    """
    environment.setdefault("GLOO_ENABLE_STORE_V2_API", "1")  # all addresses by one read of the store
    loopback = _interface_of("127.0.0.1") if world.one_machine else None
    if loopback is not None:
        environment.setdefault("GLOO_SOCKET_IFNAME", loopback)
        environment.setdefault("NCCL_SOCKET_IFNAME", loopback)
    elif "GLOO_SOCKET_IFNAME" not in environment:
        others = dict.fromkeys(host for host in hosts if host != world.host)  # many ranks, few hosts
        towards = (interface_towards(host + suffix) for host in others)
        interface = next((interface for interface in towards if interface is not None), None)
        if interface is not None:
            environment["GLOO_SOCKET_IFNAME"] = interface
    return environment.get("GLOO_SOCKET_IFNAME")


def listening_address(environment: Mapping[str, str], *, world: World, suffix: str = "") -> str | None:
    """The address of this host by which the run's other hosts reach it; None if nothing tells it.

    It is that of the interface that gloo's or NCCL's variable names, else what this host's own name with
    `cluster.master_suffix` resolves to, else that of the interface that leads to another host.
    """
    own = _reachable_addresses()
    for name, prefixes in (("GLOO_SOCKET_IFNAME", False), ("NCCL_SOCKET_IFNAME", True)):
        for interface in _selected(environment.get(name, ""), own, prefixes=prefixes):
            return own[interface][0]
    every = [address for addresses in own.values() for address in addresses]
    named = next((address for address in _resolve(world.host + suffix) if address in every), None)
    other = next((host for host in world.hosts if host != world.host), None)
    if named is not None or other is None:
        return named
    return address_towards(other + suffix)


def interface_towards(host: str) -> str | None:
    """The interface by which this machine reaches `host`; None where there is no such name or way."""
    address = address_towards(host)
    return None if address is None else _interface_of(address)


def address_towards(host: str) -> str | None:
    """This machine's address when it speaks to `host`; None where there is no such name or way."""
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(address)  # UDP: the kernel chooses a route, nothing is sent
            except OSError:
                continue
            own = str(probe.getsockname()[0])
        if not ipaddress.ip_address(own.partition("%")[0]).is_loopback:
            return own
    return None


def own_address(environment: Mapping[str, str]) -> str:
    """This process's address on the interface that gloo uses; its host's name where that is not known."""
    entries = psutil.net_if_addrs().get(environment.get("GLOO_SOCKET_IFNAME", ""), [])
    found = [entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
    return found[0] if found else socket.gethostname()


def choose_device(setting: str, *, world: World, visible: int, available: bool, devices: int = 1) -> str:
    """The device of this process, of its `devices` the first: `cpu` or `cuda:<index>`.

    setting: `device` of the configuration (auto, cpu, cuda); visible: torch.cuda.device_count();
    available: torch.cuda.is_available(). A task that sees a single GPU was given it by Slurm, as its
    index 0. NCCL wants a GPU for each rank: where a simulated cluster has more ranks than there are,
    auto runs all of them on the CPU, and cuda lets them share (`shares_device`). CUDA_VISIBLE_DEVICES is
    Slurm's and stays as it is. Raises DeviceError.
    """
    if setting == "cpu" or (setting == "auto" and not available):
        return "cpu"
    host = socket.gethostname()
    if not available or visible == 0:
        raise DeviceError(
            f"device=cuda, but torch finds no GPU on {host}. Try device=cpu, or ask for GPUs: gpus_per_node "
            "and a cluster profile with cluster.gpus=true."
        )
    if visible == devices == 1 and world.launcher == "slurm":
        return "cuda:0"
    if visible >= world.local_world_size * devices:
        return f"cuda:{world.local_rank * devices}"
    if world.launcher != "slurm" and setting == "auto":
        return "cpu"
    if world.launcher != "slurm" and devices == 1:
        return f"cuda:{world.local_rank % visible}"
    wanted = f" for {devices} devices each" if devices > 1 else ""
    raise DeviceError(
        f"device={setting}, but {world.local_world_size} ranks share the {visible} GPUs of {host}{wanted}. "
        "Try fewer nodes or gpus_per_node, or device=cpu."
    )


def shares_device(device: str, *, world: World, visible: int) -> bool:
    """Whether ranks of this host have one GPU together, as `choose_device` gave them; alike on all ranks."""
    return device.startswith("cuda") and world.launcher != "slurm" and visible < world.local_world_size


def backend(device: str, *, shared: bool) -> str:
    """The backend of init_process_group: NCCL for tensors on GPUs and gloo for the rest.

    NCCL refuses two ranks on one GPU; gloo takes their tensors through the host's memory.
    """
    return "cpu:gloo,cuda:nccl" if device.startswith("cuda") and not shared else "gloo"


def cpu_threads(world: World, environment: Mapping[str, str]) -> int:
    """Threads for torch's operators in this process: as told, else its share of the cores, at least 1."""
    told = ["OMP_NUM_THREADS"]
    if world.launcher == "slurm":  # else it speaks of an outer task, which several ranks share
        told.append("SLURM_CPUS_PER_TASK")
    for name in told:
        first = environment.get(name, "").partition(",")[0]  # OMP_NUM_THREADS=4,2: one a nesting level
        if first.isdigit() and int(first) > 0:
            return int(first)
    return max(1, len(os.sched_getaffinity(0)) // world.local_world_size)


def _interface_of(address: str) -> str | None:
    for interface, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return interface
    return None


def _reachable_addresses() -> dict[str, list[str]]:
    """Of each interface that other hosts may reach, its addresses, those of IPv4 first."""
    found: dict[str, list[str]] = {}
    for interface, entries in psutil.net_if_addrs().items():
        for family in (socket.AF_INET, socket.AF_INET6):
            for entry in entries:
                if entry.family == family and not _is_local(entry.address):
                    found.setdefault(interface, []).append(entry.address)
    return found


def _is_local(address: str) -> bool:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return parsed.is_loopback or parsed.is_link_local


def _selected(setting: str, interfaces: Iterable[str], *, prefixes: bool) -> list[str]:
    """The interfaces that `ib0,eth0` (gloo), `ib` or `=ib0` (NCCL) names; `^lo` only rules some out."""
    if setting.startswith("^"):
        return []
    exact = not prefixes or setting.startswith("=")
    names = list(filter(None, setting.removeprefix("=").split(",")))
    return [
        interface
        for name in names
        for interface in interfaces
        if (interface == name if exact else interface.startswith(name))
    ]


def _resolve(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(address[0]) for *_, address in found]
