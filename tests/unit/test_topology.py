"""How GPUs and network cards are connected: against the words of `nvidia-smi topo -m` for known machines."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hpc_parallel.machine.topology import alike, topology
from hpc_parallel.record.environment_file import Environment, Topology, Transport
from hpc_parallel.record.typed import build
from hpc_parallel.report.run_lines import topology_lines, transport_lines
from tests.nvml import Nvml, not_supported

# Two host bridges. GPU0, GPU1 and mlx5_0 below one switch; eth0 at a root port of its own; GPU2 far away.
PLACES = {
    "0000:1a:00.0": ("pci0000:17/0000:17:01.0/0000:18:00.0/0000:19:00.0", 0),
    "0000:1b:00.0": ("pci0000:17/0000:17:01.0/0000:18:00.0/0000:19:01.0", 0),
    "0000:1c:00.0": ("pci0000:17/0000:17:01.0/0000:18:00.0/0000:19:02.0", 0),
    "0000:22:00.0": ("pci0000:17/0000:17:02.0", 0),
    "0000:31:00.0": ("pci0000:30/0000:30:01.0", 0),
    "0000:98:00.0": ("pci0000:97/0000:97:01.0", 1),
}


def nvml(links: dict[int, list[str]], *, switch: bool = False) -> Nvml:
    """Three GPUs; `links` of GPU -> bus addresses of the other ends."""
    buses = ["00000000:1A:00.0", "00000000:1B:00.0", "00000000:98:00.0"]
    return Nvml(
        len(buses),
        nvmlDeviceGetName=lambda handle: b"NVIDIA A100",
        nvmlDeviceGetPciInfo=lambda handle: SimpleNamespace(busId=buses[handle]),
        nvmlDeviceGetNvLinkState=lambda handle, link: (
            1 if link < len(links.get(handle, [])) else not_supported()
        ),
        nvmlDeviceGetNvLinkRemoteDeviceType=lambda handle, link: 2 if switch else 0,
        nvmlDeviceGetNvLinkRemotePciInfo=lambda handle, link: SimpleNamespace(busId=links[handle][link]),
    )


def tree(root: Path) -> Path:
    for bus, (place, numa) in PLACES.items():
        folder = root / "devices" / place / bus
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{numa}\n")
        link = root / "bus" / "pci" / "devices" / bus
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder)
    for name, bus in (("infiniband/mlx5_0", "0000:1c:00.0"), ("net/ib0", "0000:1c:00.0"),
                      ("net/eth0", "0000:22:00.0"), ("net/eth1", "0000:31:00.0")):  # fmt: skip
        folder = root / "class" / name
        folder.mkdir(parents=True)
        (folder / "device").symlink_to(root / "bus" / "pci" / "devices" / bus)
    (root / "class" / "net" / "lo").mkdir()
    return root


def words(shape: dict[str, Any], one: str) -> dict[str, str]:
    names = [part["name"] for part in shape["parts"]]
    return dict(zip(names, shape["links"][names.index(one)], strict=True))


def test_connections_have_the_words_of_nvidia_smi(tmp_path: Path) -> None:
    shape = topology(
        nvml=nvml({0: ["00000000:98:00.0"] * 4, 2: ["00000000:1A:00.0"] * 4}), sysfs=tree(tmp_path)
    )
    assert words(shape, "GPU0") == {
        "GPU0": "X", "GPU1": "PIX", "GPU2": "NV4", "mlx5_0": "PIX", "eth0": "PHB", "eth1": "NODE",
    }  # fmt: skip
    assert words(shape, "GPU2") == {
        "GPU0": "NV4", "GPU1": "SYS", "GPU2": "X", "mlx5_0": "SYS", "eth0": "SYS", "eth1": "SYS",
    }  # fmt: skip
    assert [part["numa"] for part in shape["parts"]] == [0, 0, 1, 0, 0, 0]


def test_gpus_below_a_switch_of_nvlinks_reach_each_other(tmp_path: Path) -> None:
    switched = nvml({gpu: ["00000000:05:00.0"] * 18 for gpu in range(3)}, switch=True)
    shape = topology(nvml=switched, sysfs=tree(tmp_path))
    assert [row[:3] for row in shape["links"][:3]] == [
        ["X", "NV18", "NV18"], ["NV18", "X", "NV18"], ["NV18", "NV18", "X"],
    ]  # fmt: skip


def test_hosts_that_are_alike_are_drawn_once(tmp_path: Path) -> None:
    shape = topology(sysfs=tree(tmp_path))
    other = topology(sysfs=tmp_path / "missing")
    assert [part["name"] for part in shape["parts"]] == ["mlx5_0", "eth0", "eth1"]
    assert other == {"parts": [], "links": []}
    shapes = alike({"n1": shape, "n2": dict(shape), "n3": other})
    assert [each["hosts"] for each in shapes] == [["n1", "n2"], ["n3"]]
    assert topology_lines(topologies(shapes)) == [
        "n1, n2",
        "        mlx5_0  eth0  eth1  NUMA  model",
        "mlx5_0  X       PHB   NODE  0",
        "eth0    PHB     X     NODE  0",
        "eth1    NODE    NODE  X     0",
    ]


def topologies(values: Any) -> tuple[Topology, ...]:
    environment = build(Environment, {"topology": values})
    return environment.topology


def transport(values: Any) -> Transport:
    environment = build(Environment, {"transport": values})
    return environment.transport


def test_the_files_of_others_are_checked() -> None:
    part = {"name": "\x1b[2J", "model": 5, "numa": "x"}
    for topology_ in (5, [5], [{"hosts": 5}], [{"parts": [part, part], "links": [["X"], 5]}]):
        assert topology_lines(topologies(topology_)) == []
    odd = {"hosts": ["n\x1b"], "parts": [part] * 2, "links": [["\x1b", 3]] * 2}
    lines = topology_lines(topologies([odd]))
    assert lines
    assert "\x1b" not in "".join(lines)
    record = {"pairs": {"across nodes": {"NET/\x1bIB": 3, "x": "y"}}, "problem": "a\x1bb", "network": 7,
              "gpudirect": {"across nodes": "on\x1b", "inside a node": 3}, "rings": "yes", "channels": "4",
              "nvls_available": 1}  # fmt: skip
    lines = [line for pair in transport_lines(transport(record)) for line in pair]
    assert "\x1b" not in "".join(lines)
    assert transport_lines(transport({"pairs": 4})) == transport_lines(Transport()) == []
