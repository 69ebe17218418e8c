"""What is said if data between nodes does not go as the site expects; the log that NCCL is made to keep."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from hpc_parallel.machine.nccl_log import ACROSS, INSIDE, NcclTransport, keep_log
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.start.join import by_differing_host
from hpc_parallel.start.transport import FabricError, TransportCheck, problem_of, report

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
