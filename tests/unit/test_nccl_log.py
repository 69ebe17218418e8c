"""The start of NCCL as its log says it, in the formats of versions 2.18 to 2.30.

The lines are filled in by hand into the formats of NCCL's source (src/init.cc, src/transport/*.cc), which
was compared for each of 2.18.6, 2.19.4, 2.20.5, 2.21.5, 2.22.3, 2.23.4, 2.24.3, 2.25.1, 2.26.6, 2.27.7,
2.28.9, 2.29.7 and 2.30.7. Those of RCCL are filled into the formats of logs that users of it have published.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hpc_parallel.machine.nccl_log import ACROSS, INSIDE, NcclTransport, carrier, keep_log, merged, parse
from hpc_parallel.record.environment_file import Transport
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.typed import build
from hpc_parallel.report.run_lines import transport_lines
from hpc_parallel.start.join import by_differing_host
from hpc_parallel.start.transport import FabricError, TransportCheck, problem_of, report

HOSTS = ["a", "a", "b", "b"]
VERSIONS = ("2.18.6", "2.19.4", "2.20.5", "2.21.5", "2.22.3", "2.23.4", "2.24.3", "2.25.1", "2.26.6",
            "2.27.7", "2.28.9", "2.29.7", "2.30.7")  # fmt: skip
DIRECT_IB, DIRECT_OFI = "NET/IB, GPUDirect RDMA", "NET/OFI, GPUDirect RDMA"
NETWORKS = {  # fabric -> as NCCL names its network, a connection over it, and the carrier
    "infiniband": ("IB", "NET/IB/0/GDRDMA", DIRECT_IB),
    "infiniband of a plugin": ("IBext_v8", "NET/IBext_v8/0(2)/GDRDMA/Shared", DIRECT_IB),
    "roce": ("IB", "NET/IB/1(3)", "NET/IB"),
    "slingshot": ("AWS Libfabric", "NET/AWS Libfabric/3/GDRDMA", DIRECT_OFI),
    "efa": ("Libfabric", "NET/Libfabric/0(1)/GDRDMA/Shared", DIRECT_OFI),
    "tcp": ("Socket", "NET/Socket/0", "NET/Socket"),
}
RCCL_HEADS = {
    "2.18.3": "RCCL version 2.18.3+hip6.0 HEAD:2f6d59e+",
    "2.20.5": "RCCL version 2.20.5+hip6.2 HEAD:45b618a+",
    "2.26.6": "RCCL version : 2.26.6-HEAD:f224e2c",
    "2.30.4": "RCCL version : 2.30.4-HEAD:2b22ab0",
}


def lines_of(record: dict[str, Any]) -> list[tuple[str, str]]:
    transport = build(Transport, record)
    assert transport is not None
    return transport_lines(transport)


def log(version: str, *, network: str = "IB", via: str = "NET/IB/0/GDRDMA", nvls: bool = True) -> str:
    """The log of rank 1 of four ranks on two hosts."""
    number = tuple(map(int, version.split(".")))
    says = "a:101:202 [1] NCCL INFO "
    rings = "Connected all rings" + ", use ring PXN 0 GDR 1" * (number >= (2, 23))
    collnet = "" if number < (2, 19) else " 0 collnet channels,"
    nvls_line = f"NVLS multicast support is {'' if nvls else 'not '}available on dev 1"
    memory = "IPC" if number < (2, 19) else "CUMEM"
    shared = "SHM/direct" if number >= (2, 30) else "SHM/direct/direct"
    if number >= (2, 24):
        nvls_line += " (NVLS_NCHANNELS 16)" if nvls else ""
    lines = [
        f"NCCL version {version}+cuda12.4",
        "NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB ib0:10.0.0.1<0>",
        f"Using network {network}",
        nvls_line,
        "Channel 00/02 :    0   1   2   3",
        "Trees [0] 0/-1/-1->1->2 [1] 0/-1/-1->1->2",
        f"Channel 00/0 : 1[1] -> 2[0] [send] via {via}",
        f"Channel 01/0 : 1[1] -> 2[0] [send] via {via}",
        f"Channel 00/0 : 3[1] -> 1[1] [receive] via {via}",
        f"Channel 00/0 : 1[1] -> 0[0] via P2P/{memory}/read",
        f"Channel 01 : 1[1] -> 0[0] via {shared}",
        rings,
        "Connected all trees",
        f"2 coll channels,{collnet} {16 * nvls} nvls channels, 4 p2p channels, 2 p2p channels per peer",
        "comm 0x55 rank 1 nranks 4 cudaDev 1 nvmlDev 1 busId 1a000 commId 0x77 - Init COMPLETE",
    ]
    return "".join(f"{says}{line}\n" for line in lines)


@pytest.mark.parametrize("fabric", NETWORKS)
@pytest.mark.parametrize("version", VERSIONS)
def test_each_fabric_is_read_in_each_version(version: str, fabric: str) -> None:
    network, via, across = NETWORKS[fabric]
    memory = "IPC" if version.startswith("2.18") else "CUMEM"
    inside = Counter({f"P2P ({memory})": 1, "SHM": 1})
    assert parse(log(version, network=network, via=via), hosts=HOSTS) == NcclTransport(
        version=version, network=network, channels=2, nvls_channels=16, nvls_available=True, rings=True,
        trees=True, pairs={ACROSS: Counter({across: 2}), INSIDE: inside},
    )  # fmt: skip


def rccl_log(version: str) -> str:
    """The log of rank 1 of four ranks on two hosts with AMD's GPUs."""
    communicator = " comm 0xa09f20 nRanks 04"
    lines = [
        RCCL_HEADS[version],
        "Using network AWS Libfabric",
        f"Trees [0] 0/-1/-1->1->2 [1] 0/-1/-1->1->2{communicator} busId c6000",
        f"Channel 00/0 : 1[c6000] -> 2[c1000] [send] via NET/AWS Libfabric/1/GDRDMA{communicator}",
        f"Channel 01/0 : 3[c6000] -> 1[c6000] [receive] via NET/AWS Libfabric/1/GDRDMA{communicator}",
        f"Channel 00/0 : 1[c6000] -> 0[c1000] via P2P/IPC{communicator}",
        "Channel 01/0 : 1[c6000] -> 0[c1000] via P2P/IPC comm 0xb10000 nRanks 04",
        f"Channel 02 : 1[c6000] -> 0[c1000] via SHM/direct/direct{communicator}",
        f"Connected all rings{communicator} busId c6000",
        f"Connected all trees{communicator} busId c6000",
        "4 coll channels, 0 collnet channels, 0 nvls channels, 4 p2p channels, 2 p2p channels per peer",
    ]
    return "".join(f"a:101:202 [1] NCCL INFO {line}\n" for line in lines)


@pytest.mark.parametrize("version", RCCL_HEADS)
def test_rccl_is_read(version: str) -> None:
    """Its lines end with the address of a communicator, which is no part of the transport's name."""
    found = parse(rccl_log(version), hosts=HOSTS)
    inside = Counter({"P2P (IPC)": 2, "SHM": 1})
    assert found == NcclTransport(
        library="RCCL", version=version, network="AWS Libfabric", channels=4, rings=True, trees=True,
        pairs={ACROSS: Counter({DIRECT_OFI: 1}), INSIDE: inside},
    )  # fmt: skip
    lines = dict(lines_of(merged([found, NcclTransport()]).as_record()))
    assert lines["transport"] == f"RCCL {version}, AWS Libfabric, connected so far"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("NET/IB/0", "NET/IB"),
        ("NET/IB/3(5)/GDRDMA/Shared", "NET/IB, GPUDirect RDMA"),
        ("NET/IBext_v8/2/GDRDMA(PCI)", "NET/IB, GPUDirect RDMA"),
        ("NET/AWS Libfabric/1(2)/GDRDMA/Shared", "NET/OFI, GPUDirect RDMA"),
        ("NET/Libfabric/0", "NET/OFI"),
        ("NET/OFI/0", "NET/OFI"),
        ("NET/Socket/0", "NET/Socket"),
        ("P2P/direct pointer/read", "P2P (direct pointer)"),
        ("P2P/indirect/3[3]", "P2P (indirect)"),
        ("P2P/CUMEM/CE/read", "P2P (CUMEM)"),
        ("SHM/CE/direct", "SHM"),
    ],
)
def test_carriers(text: str, expected: str) -> None:
    assert carrier(text) == expected


def test_ranks_are_merged() -> None:
    one = parse(log("2.21.5"), hosts=HOSTS)
    other = parse(log("2.21.5", via="NET/Socket/0", network="Socket", nvls=False), hosts=HOSTS)
    total = merged([one, NcclTransport(**json.loads(json.dumps(vars(other))))])
    assert total.across == ["NET/IB, GPUDirect RDMA", "NET/Socket"]
    assert total.pairs[INSIDE] == Counter({"P2P (CUMEM)": 2, "SHM": 2})
    assert (total.channels, total.nvls_channels, total.nvls_available) == (2, 0, False)
    assert total.gpudirect == {ACROSS: "mixed"}


@pytest.mark.parametrize(
    ("via", "nvls", "direct", "multicast"),
    [("NET/IB/0/GDRDMA", True, "on", "16 channels"), ("NET/IB/0", False, "off", "not available")],
)
def test_every_part_has_a_line(via: str, nvls: bool, direct: str, multicast: str) -> None:
    record = merged([parse(log("2.27.7", via=via, nvls=nvls), hosts=HOSTS)]).as_record()
    assert record["gpudirect"] == {ACROSS: direct}
    assert lines_of(json.loads(json.dumps(record))) == [
        ("transport", "NCCL 2.27.7, IB, connected so far"),
        (INSIDE, "P2P (CUMEM) (1 channels), SHM (1 channels)"),
        (ACROSS, f"{carrier(via)} (2 channels)"),
        ("GPUDirect RDMA", f"{direct} across nodes"),
        ("channels", "2"),
        ("rings", "connected"),
        ("trees", "connected"),
        ("NVLS", multicast),
    ]


def test_what_is_not_connected_is_said() -> None:
    text = log("2.27.7").replace("Connected all trees", "").replace(" 16 nvls channels", " 0 nvls channels")
    lines = dict(lines_of(parse(text, hosts=HOSTS).as_record()))
    assert (lines["rings"], lines["trees"]) == ("connected", "not connected so far")
    assert lines["NVLS"] == "available, not used"


def test_what_is_not_there_is_not_known() -> None:
    assert parse("", hosts=HOSTS) == NcclTransport()
    assert parse("a:1:2 [0] NCCL INFO Channel 00/0 : 7[0] -> 9[1] via NET/IB/0\n", hosts=HOSTS).pairs == {}


NONE = "no device"


def findings(
    expected: str, *carriers: str, gloo: bool = False, devices: tuple[str, ...] = ("mlx5_0:1", "mlx5_0:1")
) -> TransportCheck:
    """Of one rank on each of several hosts."""
    hosts = [f"n{number}" for number in range(1, len(devices) + 1)]
    pairs = {INSIDE: Counter({"SHM": 2}), ACROSS: Counter(carriers)}
    transport = (
        None if gloo else NcclTransport(pairs={name: counts for name, counts in pairs.items() if counts})
    )
    return TransportCheck(
        expected, dict.fromkeys(hosts, expected), dict(zip(hosts, devices, strict=True)), transport
    )


@pytest.mark.parametrize(
    ("findings", "require", "problem"),
    [
        (findings("infiniband", "NET/IB, GPUDirect RDMA"), True, None),
        (findings("tcp", "NET/Socket"), False, None),
        (findings("infiniband", "NET/Socket", devices=("mlx5_0:1",)), True, None),  # one host
        (findings("infiniband", gloo=True), False, None),
        (findings("tcp", "NET/Socket"), True, "no host has a device of a fabric with RDMA"),
        (
            findings("infiniband", "NET/IB", "NET/Socket", devices=("mlx5_0:1", NONE)), False,
            "NCCL sends between nodes through sockets (NET/Socket), and the fabric should be infiniband "
            "(no active device on n2)",
        ),
        (
            findings("slingshot", "NET/Socket", devices=("hsn0", "hsn0")), False,
            "NCCL sends between nodes through sockets (NET/Socket), and the fabric should be slingshot "
            "(hsn0); the plugin aws-ofi-nccl was not loaded",
        ),
        (
            findings("roce"), False,
            "NCCL's log does not say what carries data between nodes: unset NCCL_DEBUG; the fabric should be "
            "roce (mlx5_0:1)",
        ),
        (
            findings("infiniband", gloo=True, devices=(NONE,) * 10), True,
            "gloo sends between nodes through sockets, and the fabric should be infiniband (no active device "
            "on n1, n2, n3, n4, n5, n6, n7, n8 and others)",
        ),
    ],
)  # fmt: skip
def test_the_problem_is_one_sentence(findings: TransportCheck, require: bool, problem: str | None) -> None:
    assert problem_of(findings, require=require) == problem


def test_the_library_and_its_plugin_are_named() -> None:
    rccl = NcclTransport(library="RCCL", pairs={ACROSS: Counter(["NET/Socket"])})
    hosts = dict.fromkeys(["n1", "n2"], "slingshot")
    check = TransportCheck("slingshot", hosts, dict.fromkeys(hosts, "hsn0"), rccl)
    assert problem_of(check, require=True) == (
        "RCCL sends between nodes through sockets (NET/Socket), and the fabric should be slingshot (hsn0); "
        "the plugin aws-ofi-rccl was not loaded"
    )


def test_a_required_fabric_stops_the_run() -> None:
    with pytest.raises(FabricError, match=r"^through sockets \(fabric.require=true\)$"):
        report("through sockets", require=True)


def test_nccl_keeps_a_log_unless_somebody_chose_another(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    environment: dict[str, str] = {}
    reasons = keep_log(folder, rank=3, environment=environment)
    assert reasons == dict.fromkeys(environment, "the proof of transport reads this log")
    assert environment == {
        "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET",
        "NCCL_DEBUG_FILE": f"{tmp_path}/logs/rank-3.nccl",
    }  # fmt: skip
    environment = {"NCCL_DEBUG": "WARN"}
    assert keep_log(folder, rank=3, environment=environment) == {}
    assert environment == {"NCCL_DEBUG": "WARN"}


def test_hosts_with_other_variables_are_listed_once_each() -> None:
    def settings(interface: str, rank: int) -> dict[str, dict[str, str]]:
        variables = {"GLOO_SOCKET_IFNAME": interface, "NCCL_DEBUG_FILE": f"logs/rank-{rank}.nccl"}
        return {"variables": variables, "reasons": {"NCCL_DEBUG_FILE": "the proof"}}

    assert by_differing_host({"n1": settings("ib0", 0), "n2": settings("ib0", 4)}) == []
    by_host = {"n1": settings("ib0", 0), "n2": settings("ib1", 4), "n3": settings("ib0", 8)}
    assert by_differing_host(by_host) == [
        {"variables": {"GLOO_SOCKET_IFNAME": "ib0"}, "reasons": {}, "hosts": ["n1", "n3"]},
        {"variables": {"GLOO_SOCKET_IFNAME": "ib1"}, "reasons": {}, "hosts": ["n2"]},
    ]
