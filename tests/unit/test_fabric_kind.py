"""Which fabric a host has, and the variables for it, from trees like /sys of real machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_parallel.config.checks.all_checks import find_problems
from hpc_parallel.config.fabric_kinds import KINDS
from hpc_parallel.config.resolve import resolve
from hpc_parallel.machine.fabric_kind import fabric_devices, set_fabric
from tests.composed import composed

INFINIBAND, ETHERNET = "InfiniBand", "Ethernet"


class Sysfs:
    """A tree like /sys."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def driver(self, device: str, name: str) -> None:
        """Link the driver of `class/GROUP/NAME`."""
        target = self.root / "bus" / "drivers" / name
        target.mkdir(parents=True, exist_ok=True)
        folder = self.root / "class" / device / "device"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "driver").symlink_to(target)

    def port(self, device: str, *, link: str = INFINIBAND, state: str = "4: ACTIVE", number: int = 1) -> str:
        folder = f"class/infiniband/{device}/ports/{number}"
        self.write(f"{folder}/state", state)
        self.write(f"{folder}/link_layer", link)
        return folder

    def gid(self, port: str, index: int, *, kind: str, address: str) -> None:
        self.write(f"{port}/gid_attrs/types/{index}", kind)
        self.write(f"{port}/gids/{index}", address)


@pytest.fixture
def sysfs(tmp_path: Path) -> Sysfs:
    return Sysfs(tmp_path)


def chosen(sysfs: Sysfs, *, kind: str = "auto", nccl: bool = True, **known: str) -> dict[str, str]:
    environment = dict(known)
    reasons = set_fabric(kind, fabric_devices(sysfs.root), environment, nccl=nccl, one_machine=False)
    new = {name: value for name, value in environment.items() if name not in known}
    assert reasons.keys() == new.keys()
    return new


def test_infiniband_names_its_active_ports(sysfs: Sysfs) -> None:
    for device in ("mlx5_0", "mlx5_3"):
        sysfs.port(device)
    sysfs.port("mlx5_1", state="1: DOWN")
    sysfs.port("mlx5_2", link=ETHERNET)  # the card of the service network
    assert fabric_devices(sysfs.root).kind == "infiniband"
    assert chosen(sysfs) == {"NCCL_IB_HCA": "=mlx5_0:1,mlx5_3:1"}
    assert chosen(sysfs, NCCL_IB_HCA="mlx5") == {}
    assert chosen(sysfs, nccl=False) == {}
    assert chosen(sysfs, kind="roce") == {"NCCL_IB_HCA": "=mlx5_2:1"}


@pytest.mark.parametrize(("indices", "expected"), [((3, 3), "3"), ((3, 5), None)])
def test_roce_needs_the_gid_of_version_2(
    indices: tuple[int, int], expected: str | None, sysfs: Sysfs
) -> None:
    for device, index in zip(("mlx5_0", "mlx5_1"), indices, strict=True):
        port = sysfs.port(device, link=ETHERNET)
        sysfs.gid(port, 0, kind="IB/RoCE v1", address="fe80:0000:0000:0000:0000:0000:0000:0001")
        sysfs.gid(port, 1, kind="RoCE v2", address="fe80:0000:0000:0000:0000:0000:0000:0001")
        sysfs.gid(port, 2, kind="IB/RoCE v1", address="0000:0000:0000:0000:0000:ffff:0a00:0001")
        sysfs.gid(port, index, kind="RoCE v2", address="0000:0000:0000:0000:0000:ffff:0a00:0001")
    assert fabric_devices(sysfs.root).kind == "roce"
    found = chosen(sysfs)
    assert found["NCCL_IB_HCA"] == "=mlx5_0:1,mlx5_1:1"
    assert found.get("NCCL_IB_GID_INDEX") == expected


def test_slingshot_is_known_by_its_interfaces(sysfs: Sysfs) -> None:
    for name in ("hsn0", "hsn1", "eth0"):
        sysfs.driver(f"net/{name}", "cxi_ss1" if name.startswith("hsn") else "igb")
    assert fabric_devices(sysfs.root).slingshot == ["hsn0", "hsn1"]
    found = chosen(sysfs)
    assert (found["NCCL_SOCKET_IFNAME"], found["GLOO_SOCKET_IFNAME"]) == ("hsn", "hsn0")
    assert found["FI_MR_CACHE_MONITOR"] == "userfaultfd"
    assert chosen(sysfs, nccl=False) == {"GLOO_SOCKET_IFNAME": "hsn0"}


def test_interfaces_of_mellanox_are_no_slingshot(sysfs: Sysfs) -> None:
    sysfs.driver("net/hsn0", "mlx5_core")
    sysfs.port("mlx5_0", link=ETHERNET)
    assert fabric_devices(sysfs.root).kind == "roce"


def test_efa_is_known_by_its_driver(sysfs: Sysfs) -> None:
    sysfs.driver("infiniband/rdmap0s6", "efa")
    sysfs.port("rdmap0s6")
    devices = fabric_devices(sysfs.root)
    assert (devices.kind, devices.describe("efa"), devices.ports) == ("efa", "rdmap0s6", [])
    assert chosen(sysfs) == {"FI_EFA_USE_HUGE_PAGE": "0"}


def test_a_host_without_such_devices_has_tcp(sysfs: Sysfs) -> None:
    sysfs.driver("net/eth0", "virtio_net")
    assert fabric_devices(sysfs.root).kind == "tcp"
    assert chosen(sysfs) == {"NCCL_SOCKET_IFNAME": "^docker,lo"}
    assert fabric_devices(sysfs.root / "missing").kind == "tcp"
    environment: dict[str, str] = {}
    assert set_fabric("auto", fabric_devices(sysfs.root), environment, nccl=True, one_machine=True) == {}
    assert environment == {}


def test_wrong_settings_are_refused() -> None:
    words = ["cluster.fabric=infinband", "fabric.require=true"]
    (problem,) = find_problems(resolve(composed(*words))[0], words)
    assert str(problem) == (
        f"cluster.fabric = infinband is not one of {', '.join(KINDS)}. Try cluster.fabric=infiniband."
    )
    words = ["cluster.fabric=tcp", "fabric.require=true", "nodes=2", "device=cpu", "launcher=script"]
    (problem,) = find_problems(resolve(composed(*words))[0], words)
    assert str(problem).startswith("cluster.fabric = tcp can't be with fabric.require=true")


@pytest.mark.parametrize("word", ["device=cpu", "cluster=cpu"])
def test_what_only_gpus_can_prove_is_not_required_of_cpus(word: str) -> None:
    words = ["nodes=2", word, "launcher=script", "fabric.require=true"]
    (problem,) = find_problems(resolve(composed(*words))[0], words)
    assert str(problem) == (
        "fabric.require = true needs GPUs: on CPUs, gloo always uses sockets. Try fabric.require=false."
    )
    for legal in (["nodes=1", *words[1:]], [*words[:2], "launcher=local", words[3]], ["nodes=2", *words[2:]]):
        assert find_problems(resolve(composed(*legal))[0], legal) == []
