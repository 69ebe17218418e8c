"""Choose the network variables, the network interface, the device and the threads of a process."""

from __future__ import annotations

import ipaddress
import os
import socket
import tempfile
from collections.abc import Iterable, Mapping, MutableMapping
from string import Template
from typing import Any

import psutil

from hpc_parallel.machine.world import World
from hpc_parallel.problems import nearest

REACHES = "the interface that reaches the run's other hosts"
STORE = "one read of the store gives all addresses"
LAZY = "a rank connects to those that it sends to, not to every other one"
MOST_CONNECTED = 32  # up to this many ranks, gloo connects each pair: at most 31 sockets per group
RECORDED = (
    "NCCL_",
    "GLOO_",
    "FI_",
    "OMP_",
    "TORCH_NCCL_",
    "TORCH_FR_",
    "TORCH_GLOO_",
    "UCX_",
    "CUDA_VISIBLE_DEVICES",
)


class DeviceError(RuntimeError):
    """The requested device is not available."""


def as_text(value: object) -> str:
    """A YAML value as the text of an environment variable: true, not True."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def site_variables(settings: Mapping[str, Any], environment: MutableMapping[str, str]) -> dict[str, str]:
    """Set the site's variables that are unset; returns the reason for each that has the site's value.

    Call this before the first collective and the first use of a GPU: the libraries read them once. A process
    that started this one may have called it already.

    settings: `cluster.environment`.
    """
    values = {name: as_text(value) for name, value in settings.items()}
    set_unset(environment, values, reason="")
    return {name: "cluster.environment" for name, value in values.items() if environment[name] == value}


def set_unset(
    environment: MutableMapping[str, str], values: Mapping[str, str], *, reason: str
) -> dict[str, str]:
    """Set the variables that are unset; returns the reason for each that was set."""
    unset = {name: value for name, value in values.items() if name not in environment}
    environment.update(unset)
    return dict.fromkeys(unset, reason)


def use_scratch(folder: str | None, environment: MutableMapping[str, str], *, host: str) -> dict[str, str]:
    """Inside a job, use a folder of this host for temporary files, such as compiled kernels.

    folder: `cluster.scratch`, with variables of the job such as `$SLURM_TMPDIR`.

    Returns the reason for the variable that was set.

    Raises DeviceError if the folder does not exist or can't be written.
    """
    if folder is None or "SLURM_JOB_ID" not in environment:
        return {}
    path = Template(folder).safe_substitute(environment)
    if not os.access(path, os.W_OK | os.X_OK) or not os.path.isdir(path):
        raise DeviceError(f"cluster.scratch={folder}: {host} has no folder {path} that this user can write")
    environment["TMPDIR"] = path
    tempfile.tempdir = None  # forget the cached folder
    return {"TMPDIR": f"cluster.scratch={folder}"}


def recorded(environment: Mapping[str, str], *, also: Iterable[str] = ()) -> dict[str, str]:
    """The effective network variables, sorted, for environment.json."""
    extra = set(also)
    names = sorted(name for name in environment if name.startswith(RECORDED) or name in extra)
    return {name: environment[name] for name in names}


def set_sockets(
    environment: MutableMapping[str, str], *, world: World, hosts: Iterable[str], suffix: str = ""
) -> dict[str, str]:
    """Set the unset variables that choose the interfaces of gloo and NCCL, before the first group.

    On one machine both use loopback. Otherwise GLOO_SOCKET_IFNAME becomes the interface that reaches the
    run's other hosts. gloo's default is the address of this host's name, which is 127.0.1.1 on Debian and
    may be a management network elsewhere. NCCL then examines all interfaces itself.

    hosts: names of the run's hosts (`World.hosts` or `rendezvous.hosts`); suffix: `cluster.master_suffix`.

    With many ranks, two ranks connect when one first sends to the other.

    Returns the reason for each variable that was set. If no interface was found, gloo keeps its default.
    """
    reasons = set_unset(environment, {"GLOO_ENABLE_STORE_V2_API": "1"}, reason=STORE)
    if world.world_size > MOST_CONNECTED:
        reasons |= set_unset(environment, {"TORCH_GLOO_LAZY_INIT": "1"}, reason=LAZY)
    return reasons | set_interfaces(environment, world=world, hosts=hosts, suffix=suffix)


def set_interfaces(
    environment: MutableMapping[str, str], *, world: World, hosts: Iterable[str], suffix: str
) -> dict[str, str]:
    """The part of `set_sockets` that chooses interfaces. It fits every program that uses gloo or NCCL."""
    loopback = _interface_of("127.0.0.1") if world.one_machine else None
    if loopback is not None:
        both = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), loopback)
        return set_unset(environment, both, reason="all ranks are on this machine")
    if "GLOO_SOCKET_IFNAME" not in environment:
        others = dict.fromkeys(host for host in hosts if host != world.host)  # each host once
        for other in others:
            if (interface := interface_towards(other + suffix)) is not None:
                environment["GLOO_SOCKET_IFNAME"] = interface
                return {"GLOO_SOCKET_IFNAME": REACHES}  # the same text on all hosts
    return {}


def require_interfaces(environment: Mapping[str, str], *, host: str, nccl: bool) -> None:
    """Raise DeviceError if gloo's or NCCL's variable names no network interface of this host.

    nccl: whether NCCL carries data too.
    """
    local = [
        name for name, entries in psutil.net_if_addrs().items()
        if any(entry.family in (socket.AF_INET, socket.AF_INET6) for entry in entries)
    ]  # fmt: skip
    gloo = [name for name in environment.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    of_nccl = environment.get("NCCL_SOCKET_IFNAME", "")
    missing = {"GLOO_SOCKET_IFNAME": next((name for name in gloo if name not in local), None)}
    if nccl and of_nccl and not of_nccl.startswith("^") and not _selected(of_nccl, local, prefixes=True):
        missing["NCCL_SOCKET_IFNAME"] = of_nccl
    for variable, name in missing.items():
        if name is not None:
            near = (nearest(name, local) or [name for name in local if name != "lo"] or local)[0]
            raise DeviceError(
                f"{variable}={environment[variable]}: {host} has no network interface {name} with an "
                f"address, but {', '.join(local)}. Try {variable}={near}, or unset {variable}."
            )


def listening_address(environment: Mapping[str, str], *, world: World, suffix: str = "") -> str | None:
    """The address at which the run's other hosts reach this host; None if it can't be determined.

    This is the address of the interface that gloo's or NCCL's variable names, else the address to which
    this host's name with `cluster.master_suffix` resolves, else the address used to reach another host.
    """
    local = _reachable_addresses()
    for name, prefixes in (("GLOO_SOCKET_IFNAME", False), ("NCCL_SOCKET_IFNAME", True)):
        for interface in _selected(environment.get(name, ""), local, prefixes=prefixes):
            return local[interface][0]
    local_addresses = [address for addresses in local.values() for address in addresses]
    resolved = next(
        (address for address in _resolve(world.host + suffix) if address in local_addresses), None
    )
    other = next((host for host in world.hosts if host != world.host), None)
    if resolved is not None or other is None:
        return resolved
    return address_towards(other + suffix)


def interface_towards(host: str) -> str | None:
    """The interface with which this machine reaches `host`; None without such a name or route."""
    address = address_towards(host)
    return None if address is None else _interface_of(address)


def address_towards(host: str) -> str | None:
    """This machine's source address for packets to `host`; None without such a name or route."""
    try:
        candidates = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in candidates:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(address)  # UDP: the kernel chooses a route, nothing is sent
            except OSError:
                continue
            source = str(probe.getsockname()[0])
        if not ipaddress.ip_address(source.partition("%")[0]).is_loopback:
            return source
    return None


def own_address(environment: Mapping[str, str]) -> str:
    """This process's address on the interface that gloo uses; the host name if that is unknown."""
    entries = psutil.net_if_addrs().get(environment.get("GLOO_SOCKET_IFNAME", ""), [])
    addresses = [entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
    return addresses[0] if addresses else socket.gethostname()


def use_own_slice(environment: MutableMapping[str, str], *, world: World) -> dict[str, str]:
    """Let this rank see its own slice of a GPU (MIG) if its host lists several.

    CUDA shows a process the first slice of the list only (MIG user guide, "CUDA_VISIBLE_DEVICES"), so all
    ranks of a host would compute on the same one. Call this before the first use of CUDA.

    Returns the reason for each variable that was set. Raises DeviceError if there are too few slices.
    """
    slices = [name.strip() for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if len(slices) < 2 or not all(name.startswith("MIG-") for name in slices):
        return {}
    if world.local_world_size > len(slices):
        raise DeviceError(
            f"{world.local_world_size} ranks share the {len(slices)} slices (MIG) that CUDA_VISIBLE_DEVICES "
            f"lists on {world.host}. Try gpus_per_node={len(slices)}, or device=cpu."
        )
    environment["CUDA_VISIBLE_DEVICES"] = slices[world.local_rank]
    reasons = {"CUDA_VISIBLE_DEVICES": "CUDA shows a process one slice of a GPU (MIG)"}
    return reasons | share_gpu(environment, rank=world.rank)


def choose_device(
    setting: str, *, world: World, visible: int, available: bool, devices: int = 1, bound: bool = False
) -> str:
    """Choose the first device of this process: `cpu` or `cuda:<index>`.

    If a task sees a single GPU, Slurm assigned it, with index 0. If a simulated cluster has more ranks than
    GPUs, auto runs all ranks on the CPU, and cuda lets them share (`shares_device`, `share_gpu`).
    CUDA_VISIBLE_DEVICES belongs to Slurm and is not changed, except by `use_own_slice`.

    setting: `device` of the configuration (auto, cpu, cuda); visible: torch.cuda.device_count();
    available: torch.cuda.is_available(); devices: how many this process drives; bound: whether
    `use_own_slice` chose what it sees.

    Raises DeviceError.
    """
    if setting == "cpu" or (setting == "auto" and not available):
        return "cpu"
    host = socket.gethostname()
    if not available or visible == 0:
        raise DeviceError(
            f"device=cuda, but torch finds no GPU on {host}. Try device=cpu, or ask for GPUs: gpus_per_node "
            "and a cluster profile with cluster.gpus=true."
        )
    of_a_job = bound or not may_simulate(world)
    if visible == devices == 1 and of_a_job:
        return "cuda:0"
    if visible >= world.local_world_size * devices:
        return f"cuda:{world.local_rank * devices}"
    if not of_a_job and setting == "auto":
        return "cpu"
    if not of_a_job and devices == 1:
        return f"cuda:{world.local_rank % visible}"
    demand = f" for {devices} devices each" if devices > 1 else ""
    raise DeviceError(
        f"device={setting}, but {world.local_world_size} ranks share the {visible} GPUs of {host}{demand}. "
        "Try fewer nodes or gpus_per_node, or device=cpu."
    )


def may_simulate(world: World) -> bool:
    """Whether this may be a simulated cluster: the local launcher starts its ranks with torch's agent."""
    return world.launcher in ("torchrun", "alone")


def shares_device(device: str, *, world: World, visible: int) -> bool:
    """Whether ranks of this host share a GPU after `choose_device`; the same result on all ranks."""
    return device.startswith("cuda") and may_simulate(world) and visible < world.local_world_size


def share_gpu(environment: MutableMapping[str, str], *, rank: int) -> dict[str, str]:
    """Let ranks that share a GPU talk over NCCL; returns the reason for each variable that was set.

    NCCL refuses two ranks on one GPU of a host, so each rank counts as a host of its own (NCCL_HOSTID). Their
    data goes through NCCL's sockets. Call this before the first communicator.
    """
    values = {"NCCL_HOSTID": f"rank-{rank}", "NCCL_NET": "Socket"}
    environment.update(values)  # others that the site has set are for ranks on hosts of their own
    return dict.fromkeys(values, "ranks share a GPU")


def backend(device: str) -> str:
    """The backend for init_process_group: NCCL for tensors on GPUs, gloo for all others."""
    return "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"


def cpu_threads(world: World, environment: Mapping[str, str]) -> int:
    """Threads for torch's operators: the number in the environment, else this rank's share of the cores."""
    variables = ["OMP_NUM_THREADS"]
    if world.launcher == "slurm":  # else the variable describes an outer task that several ranks share
        variables.append("SLURM_CPUS_PER_TASK")
    for name in variables:
        first = environment.get(name, "").partition(",")[0]  # OMP_NUM_THREADS=4,2: one per nesting level
        if first.isdigit() and int(first) > 0:
            return int(first)
    return max(1, len(os.sched_getaffinity(0)) // world.local_world_size)


def _interface_of(address: str) -> str | None:
    for interface, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return interface
    return None


def _reachable_addresses() -> dict[str, list[str]]:
    """Interface -> its addresses that other hosts may reach, IPv4 first."""
    reachable: dict[str, list[str]] = {}
    for interface, entries in psutil.net_if_addrs().items():
        for family in (socket.AF_INET, socket.AF_INET6):
            for entry in entries:
                if entry.family == family and not _is_local(entry.address):
                    reachable.setdefault(interface, []).append(entry.address)
    return reachable


def _is_local(address: str) -> bool:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return parsed.is_loopback or parsed.is_link_local


def _selected(setting: str, interfaces: Iterable[str], *, prefixes: bool) -> list[str]:
    """The interfaces selected by `ib0,eth0` (gloo), `ib` or `=ib0` (NCCL); none for an exclusion `^lo`."""
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
        candidates = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(address[0]) for *_, address in candidates]
