import os
import socket
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from hpc_parallel.machine import fabric
from hpc_parallel.machine.world import World
from hpc_parallel.problems import ConfigError
from tests.composed import prepared

V2 = {"GLOO_ENABLE_STORE_V2_API": "1"}


def world(*, local_world_size: int = 2, launcher: str = "slurm") -> World:
    return World(0, 4, 0, local_world_size, 0, 2, host="here", launcher=launcher, attempt="x")


def test_the_site_sets_only_unset_variables() -> None:
    environment = {"NCCL_DEBUG": "INFO", "HOME": "/root", "FI_PROVIDER": "cxi", "TORCH_NCCL_TRACE": "1"}
    site = {"NCCL_DEBUG": "WARN", "NCCL_IB_HCA": "mlx5", "MY_SITE": "a"}
    reasons = fabric.site_variables(site, environment)
    assert environment["NCCL_DEBUG"] == "INFO"
    assert environment["NCCL_IB_HCA"] == "mlx5"
    assert reasons == dict.fromkeys(("NCCL_IB_HCA", "MY_SITE"), "cluster.environment")
    assert fabric.site_variables(site, environment) == reasons  # the rank, after the process that started it
    assert fabric.recorded(environment, also=site) == {
        "FI_PROVIDER": "cxi",
        "MY_SITE": "a",
        "NCCL_DEBUG": "INFO",
        "NCCL_IB_HCA": "mlx5",
        "TORCH_NCCL_TRACE": "1",
    }


def test_gloo_and_nccl_stay_on_one_machine() -> None:
    environment: dict[str, str] = {}
    reasons = fabric.set_sockets(environment, world=world(local_world_size=4), hosts=())
    both = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "all ranks are on this machine")
    assert reasons == dict.fromkeys(V2, fabric.STORE) | both
    assert environment == V2 | {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def test_gloo_keeps_a_chosen_interface() -> None:
    environment = {"GLOO_SOCKET_IFNAME": "ib0"}
    reasons = fabric.set_sockets(environment, world=world(local_world_size=4), hosts=())
    assert environment["GLOO_SOCKET_IFNAME"] == "ib0"
    assert reasons.keys() == {*V2, "NCCL_SOCKET_IFNAME"}


def test_gloo_takes_the_interface_towards_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def towards(host: str) -> str | None:
        asked.append(host)
        return "ib0" if host == "n3-ib" else None

    monkeypatch.setattr(fabric, "interface_towards", towards)
    environment: dict[str, str] = {}
    hosts = ("here", "here", "n2", "n2", "n3", "n4")
    reasons = fabric.set_sockets(environment, world=world(), hosts=hosts, suffix="-ib")
    assert environment["GLOO_SOCKET_IFNAME"] == "ib0"
    assert reasons["GLOO_SOCKET_IFNAME"] == fabric.REACHES
    assert asked == ["n2-ib", "n3-ib"]


def test_gloo_chooses_the_interface_without_a_setting() -> None:
    environment: dict[str, str] = {}
    reasons = fabric.set_sockets(environment, world=world(), hosts=("here", "no-such-host.invalid"))
    assert reasons == dict.fromkeys(V2, fabric.STORE)
    assert environment == V2


INTERFACES = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.7"], "ib0": ["fe80::1%ib0", "fd00::7", "10.1.0.7"],
              "docker0": ["172.17.0.1"]}  # fmt: skip


@pytest.mark.parametrize(
    ("variables", "suffix", "address"),
    [
        ({}, "", "10.0.0.7"),  # what the host's own name resolves to
        ({}, "-ib", "10.1.0.7"),
        ({}, "-debian", "172.17.0.1"),  # the name is on loopback: by the way to another host
        ({}, "-other", "172.17.0.1"),  # an address of another machine
        ({"GLOO_SOCKET_IFNAME": "ib0,eth0"}, "", "10.1.0.7"),
        ({"GLOO_SOCKET_IFNAME": "ib"}, "", "10.0.0.7"),  # gloo takes whole names
        ({"NCCL_SOCKET_IFNAME": "ib"}, "", "10.1.0.7"),
        ({"NCCL_SOCKET_IFNAME": "=ib"}, "", "10.0.0.7"),
        ({"NCCL_SOCKET_IFNAME": "^docker,lo"}, "", "10.0.0.7"),
        ({"NCCL_SOCKET_IFNAME": "lo"}, "", "10.0.0.7"),  # no other host reaches it
    ],
)
def test_rank_0_listens_by_one_address(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], suffix: str, address: str
) -> None:
    def family(text: str) -> socket.AddressFamily:
        return socket.AF_INET6 if ":" in text else socket.AF_INET

    names = {"here": "10.0.0.7", "here-ib": "10.1.0.7", "here-debian": "127.0.1.1", "here-other": "10.0.0.8"}
    entries = {
        name: [SimpleNamespace(family=family(text), address=text) for text in addresses]
        for name, addresses in INTERFACES.items()
    }
    monkeypatch.setattr(fabric.psutil, "net_if_addrs", lambda: entries)
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *_, **__: [(0, 0, 0, "", (names[host], 0))] if host in names else [],
    )
    monkeypatch.setattr(fabric, "address_towards", {"n2" + suffix: "172.17.0.1"}.get)
    two = replace(world(local_world_size=2), hosts=("here", "n2"))
    assert fabric.listening_address(variables, world=two, suffix=suffix) == address


def test_without_a_name_or_another_host_nothing_is_chosen() -> None:
    unknown = replace(world(), host="no-such-host.invalid")
    assert fabric.listening_address({}, world=unknown) is None


def test_loopback_reaches_no_other_host() -> None:
    assert fabric.interface_towards("localhost") is None


@pytest.mark.parametrize(
    ("setting", "local_rank", "local_world_size", "launcher", "visible", "device"),
    [
        ("auto", 0, 2, "slurm", 0, "cpu"),
        ("cpu", 3, 4, "slurm", 4, "cpu"),
        ("auto", 3, 4, "slurm", 4, "cuda:3"),
        ("cuda", 1, 2, "torchrun", 4, "cuda:1"),
        ("cuda", 3, 4, "slurm", 1, "cuda:0"),  # bound by Slurm: sees its own GPU alone
        ("auto", 0, 2, "torchrun", 1, "cpu"),  # two simulated nodes on a workstation with one GPU
        ("auto", 0, 1, "torchrun", 1, "cuda:0"),
        ("cuda", 3, 4, "torchrun", 2, "cuda:1"),  # asked for, so shared
    ],
)
def test_device(
    setting: str, local_rank: int, local_world_size: int, launcher: str, visible: int, device: str
) -> None:
    here = replace(world(local_world_size=local_world_size, launcher=launcher), local_rank=local_rank)
    assert fabric.choose_device(setting, world=here, visible=visible, available=visible > 0) == device


def test_a_process_that_drives_several_devices_has_the_first() -> None:
    """All of them must be visible: Slurm's binding of one GPU to a task would not do."""
    here = world(local_world_size=1)
    assert fabric.choose_device("auto", world=here, visible=4, available=True, devices=4) == "cuda:0"
    with pytest.raises(fabric.DeviceError, match=r"1 ranks share the 1 GPUs of .* for 4 devices each"):
        fabric.choose_device("auto", world=here, visible=1, available=True, devices=4)
    simulated = world(local_world_size=1, launcher="torchrun")
    assert fabric.choose_device("auto", world=simulated, visible=1, available=True, devices=4) == "cpu"


def test_a_device_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fabric.socket, "gethostname", lambda: "n7")
    with pytest.raises(fabric.DeviceError, match=r"no GPU on n7.*device=cpu"):
        fabric.choose_device("cuda", world=world(), visible=0, available=False)
    for setting in ("auto", "cuda"):  # of GPUs that were asked of Slurm none is shared
        with pytest.raises(fabric.DeviceError, match=r"4 ranks share the 2 GPUs of n7"):
            fabric.choose_device(setting, world=world(local_world_size=4), visible=2, available=True)


@pytest.mark.parametrize("launcher", ["slurm", "torchrun"])
def test_each_rank_of_a_host_has_its_own_slice_of_a_gpu(launcher: str) -> None:
    """CUDA shows a process the first of several slices (MIG) only, so both ranks would take that one."""
    devices = []
    for rank in (0, 1):
        here = replace(world(launcher=launcher), rank=rank, local_rank=rank)
        environment = {"CUDA_VISIBLE_DEVICES": "MIG-7a, MIG-8b,MIG-9c"}
        reasons = fabric.use_own_slice(environment, world=here)
        assert reasons.keys() == environment.keys() == {"CUDA_VISIBLE_DEVICES", "NCCL_HOSTID", "NCCL_NET"}
        assert environment["NCCL_HOSTID"] == f"rank-{rank}"  # NCCL refuses two ranks of one host and GPU
        device = fabric.choose_device("auto", world=here, visible=1, available=True, bound=bool(reasons))
        devices.append((environment["CUDA_VISIBLE_DEVICES"], device))
    assert devices == [("MIG-7a", "cuda:0"), ("MIG-8b", "cuda:0")]


@pytest.mark.parametrize("visible", [None, "", "MIG-7a", "0,1", "GPU-8f,GPU-1a"])
def test_a_device_that_cuda_finds_by_itself_stays_as_it_is(visible: str | None) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    before = dict(environment)
    assert fabric.use_own_slice(environment, world=world()) == {}
    assert environment == before


def test_more_ranks_than_slices_are_refused() -> None:
    with pytest.raises(fabric.DeviceError, match=r"^3 ranks share the 2 slices .* Try gpus_per_node=2, or"):
        fabric.use_own_slice({"CUDA_VISIBLE_DEVICES": "MIG-7a,MIG-8b"}, world=world(local_world_size=3))


def test_backend() -> None:
    assert fabric.backend("cuda:3") == "cpu:gloo,cuda:nccl"
    assert fabric.backend("cpu") == "gloo"


@pytest.mark.parametrize(
    ("device", "launcher", "visible", "shared"),
    [
        ("cuda:0", "torchrun", 1, True),
        ("cuda:1", "torchrun", 2, False),
        ("cuda:0", "slurm", 1, False),  # each task sees the one that is its own
        ("cpu", "torchrun", 1, False),
    ],
)
def test_a_gpu_is_shared_where_there_are_fewer_than_ranks(
    device: str, launcher: str, visible: int, shared: bool
) -> None:
    here = world(local_world_size=2, launcher=launcher)
    assert fabric.shares_device(device, world=here, visible=visible) is shared


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert fabric.cpu_threads(world(), {"OMP_NUM_THREADS": "3,1", "SLURM_CPUS_PER_TASK": "5"}) == 3
    assert fabric.cpu_threads(world(), {"SLURM_CPUS_PER_TASK": "5"}) == 5
    assert fabric.cpu_threads(world(launcher="torchrun"), {"SLURM_CPUS_PER_TASK": "5"}) == 4
    assert fabric.cpu_threads(world(), {}) == 4
    assert fabric.cpu_threads(world(local_world_size=16), {}) == 1


def test_scratch_is_the_folder_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/somewhere")
    job = {"SLURM_JOB_ID": "7", "LOCAL": str(tmp_path)}
    assert fabric.use_scratch("$LOCAL", job, host="n1") == {"TMPDIR": "cluster.scratch=$LOCAL"}
    assert job["TMPDIR"] == str(tmp_path)
    assert tempfile.tempdir is None
    here = {"LOCAL": str(tmp_path)}
    assert fabric.use_scratch("$LOCAL", here, host="n1") == {}  # no job: this machine's own
    assert "TMPDIR" not in here
    with pytest.raises(fabric.DeviceError, match=r"scratch=\$NO/x: n1 has no folder \$NO/x "):
        fabric.use_scratch("$NO/x", job, host="n1")


def test_many_ranks_connect_when_they_send() -> None:
    def lazy(ranks: int) -> str | None:
        environment: dict[str, str] = {}
        big = World(0, ranks, 0, 8, 0, ranks // 8, host="here", launcher="slurm", attempt="x")
        fabric.set_sockets(environment, world=big, hosts=())
        return environment.get("TORCH_GLOO_LAZY_INIT")

    assert (lazy(32), lazy(40)) == (None, "1")


@pytest.mark.parametrize(
    ("variables", "nccl", "message"),
    [
        ({"GLOO_SOCKET_IFNAME": "eth77"}, False,
         "GLOO_SOCKET_IFNAME=eth77: n1 has no network interface eth77 with an address, but lo, eth0, ib0. "
         "Try GLOO_SOCKET_IFNAME=eth0, or unset GLOO_SOCKET_IFNAME."),
        ({"GLOO_SOCKET_IFNAME": "eth0,down0"}, False, "has no network interface down0 with an address"),
        ({"GLOO_SOCKET_IFNAME": "eth"}, False, "has no network interface eth with"),  # gloo knows no prefixes
        ({"NCCL_SOCKET_IFNAME": "hsn"}, True, "NCCL_SOCKET_IFNAME=hsn: n1 has no network interface hsn with"),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, True, "has no network interface =eth with"),
        ({"NCCL_SOCKET_IFNAME": "hsn"}, False, None),
        ({"NCCL_SOCKET_IFNAME": "^docker,lo"}, True, None),
        ({"NCCL_SOCKET_IFNAME": "eth"}, True, None),
        ({"GLOO_SOCKET_IFNAME": "ib0,eth0"}, True, None),
        ({"GLOO_SOCKET_IFNAME": ""}, True, None),
    ],
)  # fmt: skip
def test_an_interface_that_this_host_lacks_is_named(
    variables: dict[str, str], nccl: bool, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    internet = SimpleNamespace(family=socket.AF_INET)
    entries = {"lo": [internet], "eth0": [internet], "down0": [SimpleNamespace(family=17)], "ib0": [internet]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: entries)
    if message is None:
        fabric.require_interfaces(variables, host="n1", nccl=nccl)
        return
    with pytest.raises(fabric.DeviceError) as raised:
        fabric.require_interfaces(variables, host="n1", nccl=nccl)
    assert message in str(raised.value)


@pytest.mark.parametrize("words", [(), ("+cluster.environment.GLOO_SOCKET_IFNAME=eth78",)])
def test_a_run_here_is_refused_before_it_starts(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not words:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    with pytest.raises(
        ConfigError, match=r"^GLOO_SOCKET_IFNAME=eth7\d: this machine has no network interface"
    ):
        prepared("launcher=local", *words)
    prepared("launcher=script", *words)  # hosts of a job have other interfaces
