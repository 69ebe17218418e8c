"""`status`, `logs` and `cancel` on jobs of a real Slurm, from another process than the one that submitted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, unavailable_reason
from test_jobs import SMALL, Site

from hpc_parallel.slurm.jobs import Job, job_states
from tests.waiting import wait_for

pytestmark = pytest.mark.slurm

# It leaves the processors to others.
SLOW = ("model._target_=tests.models.Slow", "+model.pause_s=0.5", "strategy.verify=never",
        "launcher.check_imports=false")  # fmt: skip


def status(site: Site, *words: str) -> dict[str, dict[str, Any]]:
    """By job id."""
    rows = json.loads(site.command("status", "--json", *words).stdout)
    return {row["job_id"]: row for row in rows}


def submitted(site: Site, *words: str) -> str:
    own = {"PYTHONPATH": str(Path(__file__).parents[2])}  # the tests' own models
    done = site.run(*SMALL, "launcher=slurm", "cluster=cpu", *words, **own)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("job ")]
    return line.split()[1]


@pytest.mark.usefixtures("beside_others")
def test_jobs_are_looked_after_from_elsewhere(site: Site) -> None:
    ends = submitted(site, "nodes=1", "name=ends")
    long = submitted(site, "nodes=2", "training.steps=100000", "name=long", *SLOW)
    waits = submitted(site, "nodes=4", "name=waits", f"+launcher.extra.dependency='afterany:{long}'")
    assert site.ended(ends)["JobState"] == "COMPLETED"
    (path,) = site.home.glob("runs/long/*")
    wait_for((path / "metrics.jsonl").exists)
    rows = status(site)
    assert rows.keys() == {ends, long, waits}
    done, running = rows[ends], rows[long]
    assert (done["run"].split("/")[0], done["step"], done["steps"], done["ended"]) == ("ends", 10, 10, True)
    assert done["state"] == "completed"
    told = [running[key] for key in ("state", "nodes", "steps", "ended")]
    assert told == ["running", 2, 100000, False]
    assert running["step"] > 0
    assert [rows[waits][key] for key in ("state", "step", "reason")] == ["pending", None, "Dependency"]

    with subprocess.Popen(
        [sys.executable, "-m", "hpc_parallel", "logs", waits, "--follow"],
        cwd=site.home, env=site.environment, stderr=subprocess.PIPE, text=True,
    ) as follower:  # fmt: skip
        assert follower.stderr is not None
        assert follower.stderr.readline().startswith(f"job {waits}: pending")
        gone = site.command("cancel", waits, "--yes")
        assert (gone.returncode, gone.stderr) == (0, "")
        assert follower.wait(60) == 0  # it ends with the job
    assert json.loads((Path(rows[waits]["path"]) / "summary.json").read_text())["outcome"] == "cancelled"
    assert status(site, waits)[waits]["state"] == "cancelled"

    assert site.command("cancel", long, ends, "--yes").stderr == f"{done['run']} has ended: completed\n"
    site.ended(long)
    wait_for((path / "summary.json").exists)
    stopped = status(site, long)[long]
    assert (stopped["state"], stopped["ended"]) == ("cancelled", True)
    refused = site.command("cancel", long, "--yes")
    assert (refused.returncode, refused.stderr) == (1, f"{stopped['run']} has ended: cancelled\n")
    assert "rank 0 of 2" in site.command("logs", long).stdout


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
        wait_for(lambda: job_states(tasks)[tasks[0]].state == "RUNNING")
        found = job_states(tasks)
        assert [found[task].state for task in tasks] == ["RUNNING", *["PENDING"] * 4]
        cluster.run("scancel", tasks[0].id, tasks[4].id)
        wait_for(lambda: job_states(tasks)[tasks[0]].state == "CANCELLED")
        found = job_states(tasks)
        assert found[tasks[4]].state in ("CANCELLED", "FORGOTTEN")  # one that never ran may leave no record
        assert found[tasks[2]].state == "PENDING"
        assert job_states([Job("99999"), tasks[0]])[Job("99999")].state == "FORGOTTEN"
