"""`status`, `logs` and `cancel` on jobs of a real Slurm, from another process than the one that submitted."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, unavailable_reason
from test_jobs import SHELL, SMALL, Site

from hpc_parallel.slurm.jobs import Job, job_states

pytestmark = pytest.mark.slurm


@pytest.fixture
def site(cluster: Cluster, tmp_path: Path) -> Site:
    return Site(cluster, tmp_path)


def command(site: Site, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hpc_parallel", *words],
        cwd=site.home, env=site.environment | SHELL, capture_output=True, text=True, timeout=240,
    )  # fmt: skip


def status(site: Site, *words: str) -> dict[str, dict[str, Any]]:
    """By job id."""
    rows = json.loads(command(site, "status", "--json", *words).stdout)
    return {row["job_id"]: row for row in rows}


def submitted(site: Site, *words: str) -> str:
    done = site.run(*SMALL, "launcher=slurm", "cluster=cpu", *words)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("job ")]
    return line.split()[1]


def until(site: Site, job: str, state: str, *, within_s: float = 240) -> dict[str, Any]:
    deadline = time.monotonic() + within_s
    while (row := status(site, job)[job])["state"] != state:
        assert time.monotonic() < deadline, row
        time.sleep(2)  # each look is a process
    return row


def test_jobs_are_looked_after_from_elsewhere(site: Site) -> None:
    ends = submitted(site, "nodes=1", "name=ends")
    long = submitted(site, "nodes=2", "training.steps=100000", "name=long", "+launcher.extra.exclusive=true")
    waits = submitted(site, "nodes=4", "name=waits", "+launcher.extra.exclusive=true")
    done = until(site, ends, "completed")
    assert (done["run"].split("/")[0], done["step"], done["steps"], done["ended"]) == ("ends", 10, 10, True)
    running = until(site, long, "running")
    assert (running["nodes"], running["steps"], running["ended"]) == (2, 100000, False)
    deadline = time.monotonic() + 240
    while not status(site, long)[long]["step"]:
        assert time.monotonic() < deadline
        time.sleep(2)
    rows = status(site)
    assert rows.keys() == {ends, long, waits}
    assert (rows[waits]["state"], rows[waits]["step"]) == ("pending", None)
    assert rows[waits]["reason"] in ("Resources", "Priority", "")

    with subprocess.Popen(
        [sys.executable, "-m", "hpc_parallel", "logs", waits, "--follow"],
        cwd=site.home, env=site.environment, stderr=subprocess.PIPE, text=True,
    ) as follower:  # fmt: skip
        assert follower.stderr is not None
        assert follower.stderr.readline().startswith(f"job {waits}: pending")
        gone = command(site, "cancel", waits, "--yes")
        assert (gone.returncode, gone.stderr) == (0, "")
        assert follower.wait(60) == 0  # it ends with the job
    assert json.loads((Path(rows[waits]["path"]) / "summary.json").read_text())["outcome"] == "cancelled"
    assert status(site, waits)[waits]["state"] == "cancelled"

    assert command(site, "cancel", long, ends, "--yes").stderr == f"{done['run']} has ended: completed\n"
    stopped = until(site, long, "cancelled")
    assert stopped["ended"]
    refused = command(site, "cancel", long, "--yes")
    assert (refused.returncode, refused.stderr) == (1, f"{stopped['run']} has ended: cancelled\n")
    assert "rank 0 of 2" in command(site, "logs", long).stdout


@pytest.mark.parametrize("accounting", [False, True])
def test_the_tasks_of_an_array(accounting: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that wait sacct and squeue print one line; either id of a task is understood."""
    if reason := unavailable_reason(accounting=accounting):
        pytest.skip(reason)
    with Cluster.start(hosts=1, accounting=accounting) as cluster:
        monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
        words = ("--parsable", "--array=0-3,7%1", "--output=/dev/null", "--wrap=sleep 600")
        array = cluster.run("sbatch", *words).strip()
        tasks = [Job(f"{array}_{task}") for task in (0, 1, 2, 3, 7)]
        deadline = time.monotonic() + 240
        while (found := job_states(tasks))[tasks[0]].state != "RUNNING":
            assert time.monotonic() < deadline, found
            time.sleep(0.5)
        assert [found[task].state for task in tasks] == ["RUNNING", *["PENDING"] * 4]
        cluster.run("scancel", tasks[0].id, tasks[4].id)
        while (found := job_states(tasks))[tasks[0]].state != "CANCELLED":
            assert time.monotonic() < deadline, found
            time.sleep(0.5)
        assert found[tasks[4]].state in ("CANCELLED", "FORGOTTEN")  # one that never ran may leave no record
        assert found[tasks[2]].state == "PENDING"
        assert job_states([Job("99999"), tasks[0]])[Job("99999")].state == "FORGOTTEN"
