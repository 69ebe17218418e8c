"""The Python interface on a real Slurm: submit, wait, metrics, cancel, a refusal, devices of a node."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from test_jobs import SMALL

import hpc_parallel
from tests.waiting import PATIENCE_S, wait_for
from tests.workers import Workers

pytestmark = pytest.mark.slurm


@pytest.fixture(autouse=True)
def here(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A notebook on the login node."""
    monkeypatch.chdir(tmp_path)
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def submit(*words: str) -> hpc_parallel.Run:
    return hpc_parallel.submit(hpc_parallel.compose([*SMALL, *words]))


def job_of(run: hpc_parallel.Run) -> str:
    assert run.state.job is not None
    return run.state.job


@pytest.mark.full
def test_a_job_equals_the_local_curve(
    cluster: Cluster, workers: Workers, capfd: pytest.CaptureFixture[str]
) -> None:
    """launcher=auto; the job goes on without the Run that submitted it."""
    submitted = submit("strategy=data", "nodes=2")
    job = job_of(submitted)
    assert submitted.state.name in ("pending", "running", "completing")
    (run,) = hpc_parallel.runs()
    assert (run.path, run.state.job) == (submitted.path, job)
    with pytest.raises(TimeoutError):
        run.wait(timeout_s=0.1)
    summary = run.wait(timeout_s=300)
    assert capfd.readouterr() == ("", "")
    assert (summary["outcome"], summary["world_size"], summary["job_ids"]) == ("completed", 2, [job])
    assert (run.state.name, run.state.ended) == ("completed", True)
    assert "JobState=COMPLETED" in cluster.run("scontrol", "show", "job", job)
    alone = workers.train("strategy=single", *SMALL).losses
    assert [line["loss"] for line in run.metrics()] == pytest.approx(alone, rel=1e-5)


@pytest.mark.full
def test_a_running_job_is_cancelled_and_saves_its_state() -> None:
    run = submit("strategy=data", "nodes=2", "training.steps=100000", "training.validate_every=null")
    wait_for(run.metrics)
    run.cancel()
    assert run.wait(timeout_s=PATIENCE_S)["outcome"] == "cancelled"
    assert list((run.path / "checkpoints").glob("step-*"))
    run.cancel()  # nothing is left to cancel


@pytest.mark.full
def test_a_job_that_never_started_is_concluded(cluster: Cluster) -> None:
    """Nobody but the caller of cancel can say so."""
    run = submit("strategy=data", "nodes=2", "+launcher.extra.hold=true")
    job = job_of(run)
    assert run.state.name == "pending"
    (found,) = hpc_parallel.runs()
    found.cancel()
    assert found.wait(timeout_s=PATIENCE_S)["outcome"] == "cancelled"
    assert "JobState=CANCELLED" in cluster.run("scontrol", "show", "job", job)
    another = submit("strategy=data", "nodes=2", "+launcher.extra.hold=true")
    cluster.run("scancel", job_of(another))  # by hand: who submitted it records it
    assert another.wait(timeout_s=PATIENCE_S)["outcome"] == "cancelled"


def test_a_refusal_has_slurms_words(here: Path) -> None:
    config = hpc_parallel.compose(["launcher=slurm", "launcher.partition=gpux"])
    with pytest.raises(
        hpc_parallel.SiteRefusedError, match=r"(?s)invalid partition.*Partitions here: .*main"
    ):
        hpc_parallel.submit(config)
    assert not list(here.glob("runs/*/*"))


def test_auto_takes_the_devices_of_a_node(cluster: Cluster) -> None:
    """As Slurm itself lists them."""
    (gres,) = set(cluster.run("sinfo", "-h", "-p", "main", "-o", "%G").splitlines())
    count = int(gres.split("(")[0].rpartition(":")[2])
    run = submit(
        "strategy=pipeline", "nodes=1", "gpus_per_node=auto", "launcher=slurm", "+launcher.extra.hold=true"
    )
    assert run.config is not None
    assert run.config["gpus_per_node"] == count
    assert f"#SBATCH --gpus-per-node={count}" in (run.path / "batch_script.sh").read_text()
    record = json.loads((run.path / "environment.json").read_text())
    assert "gpus_per_node=auto" in record["overrides"]
    run.cancel()
