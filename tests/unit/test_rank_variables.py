"""`dry_run=true` names the variables that ranks set: those of `environment.json` of a run that ran."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_parallel.run import main
from hpc_parallel.sweep.rank_variables import FIRST_HOST, OTHER_HOSTS, rank_variables
from tests.composed import prepared

SITE = ("+cluster.environment.NCCL_DEBUG=INFO", "+cluster.environment.NCCL_IB_DISABLE=true")
pytestmark = pytest.mark.usefixtures("here")


def test_on_this_machine() -> None:
    run = prepared("nodes=2", *SITE)
    variables = rank_variables(run, local=True, environment={"NCCL_DEBUG": "WARN"})
    assert "NCCL_DEBUG" not in variables  # the environment's own stays
    assert variables["NCCL_IB_DISABLE"] == "true"
    assert variables["GLOO_SOCKET_IFNAME"] == variables["NCCL_SOCKET_IFNAME"] == "lo"
    assert int(variables["OMP_NUM_THREADS"]) >= 1


def test_on_a_cluster_the_interface_is_that_of_the_host() -> None:
    variables = rank_variables(prepared("nodes=2", *SITE), local=False, environment={})
    assert variables["GLOO_SOCKET_IFNAME"] == OTHER_HOSTS
    assert "OMP_NUM_THREADS" not in variables
    by_node = rank_variables(prepared("nodes=2", "cluster=mpi"), local=False, environment={})
    assert by_node["NCCL_DEBUG"] == "INFO"  # `gpu_flag: none`, and GPUs
    site = {"GLOO_SOCKET_IFNAME": "ib0"}
    assert "GLOO_SOCKET_IFNAME" not in rank_variables(prepared("nodes=2"), local=False, environment=site)


def test_threads_that_wait_here_leave_the_cores_to_others() -> None:
    run = prepared("nodes=2")
    assert rank_variables(run, local=True, environment={})["GOMP_SPINCOUNT"] == "1000"
    assert "GOMP_SPINCOUNT" not in rank_variables(run, local=True, environment={"OMP_WAIT_POLICY": "ACTIVE"})
    assert "GOMP_SPINCOUNT" not in rank_variables(run, local=False, environment={})


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["nodes=2", "cluster.master_suffix=-ib"], f"rank 0 listens on the address of {FIRST_HOST}-ib"),
        (["nodes=2", "cluster.master_suffix=-ib", "--", "train.py"], f"  MASTER_ADDR={FIRST_HOST}-ib"),
        (["nodes=1", "cluster.master_suffix=-ib"], ""),
        (["nodes=2"], ""),
    ],
)
def test_a_dry_run_shows_the_suffix_of_addresses(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("train.py").write_text("print()")
    assert main(["launcher=script", "dry_run=true", "launcher.snapshot=false", *words]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [entry.partition(" (")[0] for entry in lines if FIRST_HOST in entry] == ([line] if line else [])


def test_a_dry_run_prints_them_beside_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launcher=script", "nodes=2", "dry_run=true", "launcher.snapshot=false", *SITE]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("#!/bin/bash\n")
    lines = printed.err.splitlines()
    assert lines[0] == "each rank sets:"
    assert f"  GLOO_SOCKET_IFNAME={OTHER_HOSTS}" in lines
    assert {"  NCCL_DEBUG=INFO", "  NCCL_IB_DISABLE=true"} <= set(lines)
