"""`sweep.pack=auto` on a real Slurm: runs are steps of one job of whole nodes, each with its own outcome."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from test_jobs import Site, read
from test_sweeps import only_sweep
from test_sweeps import site as counted_site

from hpc_parallel.record.sweep_folder import Sweep
from tests.waiting import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]
PACKED = ("-m", "launcher=slurm", "launcher.snapshot=false", "launcher.cpus_per_device=4", "sweep.pack=auto")
# Notes its start with its step and its GPU, and ends as its number says.
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
number, home = int(sys.argv[1]), Path(sys.argv[2])
step = f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
with (home / "begun").open("a") as file:
    print(number, step, os.environ["CUDA_VISIBLE_DEVICES"], os.environ["MASTER_PORT"], file=file)
while number < 3 and not (home / f"go{number}").exists():
    time.sleep(0.1)
sys.exit(7 if number == 1 else 0)
"""
SLEEP = "import sys, time\ntime.sleep(float(sys.argv[1]))\n"

site_with_calls = counted_site


def outcomes(sweep: Sweep) -> list[object]:
    return [read(run.run_dir, "summary.json")["outcome"] for run in sweep.runs]


def begun(site: Site) -> list[list[str]]:
    """The words of each run's start, in the order of the starts."""
    file = site.home / "begun"
    return [line.split() for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.usefixtures("beside_others")
def test_each_run_of_a_packed_job_has_its_own_outcome(site: Site) -> None:
    """Two places for four runs: one fails, one is cancelled while it runs and one while it waits."""
    (site.home / "own.py").write_text(SCRIPT)
    words = (*PACKED, "seed=1,2,3,4", "launcher.time_minutes=5", "sweep.pack_minutes=10")
    done = site.run(*words, "--", "own.py", "{seed}", str(site.home))
    assert done.returncode == 0, done.stdout + done.stderr
    _, sweep = only_sweep(site)
    (job,) = {run.job_id or "" for run in sweep.runs}
    wait_for(lambda: len(begun(site)) == 2)
    record = site.record(job)
    assert (record["NumNodes"], record["NumCPUs"], record["MinMemoryNode"]) == ("1", "8", "0")  # a whole node
    steps = site.cluster.run("squeue", "-h", "-s", "-o", "%i", "-j", job).split()
    assert {words[1] for words in begun(site)} == {step for step in steps if step.split(".")[1].isdigit()}
    folders = [str(run.run_dir) for run in sweep.runs]
    states = json.loads(site.command("status", "--json", *folders).stdout)
    state = {each["path"]: each["state"] for each in states}
    assert [state[folder] for folder in folders] == ["running", "running", "pending", "pending"]
    assert site.command("cancel", folders[3], "--yes").returncode == 0
    (site.home / "go1").touch()
    wait_for((sweep.runs[2].run_dir / "summary.json").exists)  # it had the place of the failed run
    cancelled = site.command("cancel", folders[1], "--yes")
    assert cancelled.returncode == 0, cancelled.stderr
    assert site.ended(job)["Restarts"] == "0"
    assert outcomes(sweep) == ["failed", "cancelled", "completed", "cancelled"]
    assert "exit code 7" in str(read(sweep.runs[0].run_dir, "failure.json")["line"])
    # No run ran twice, and those beside each other had their own GPU and port.
    assert Counter(words[0] for words in begun(site)) == {"1": 1, "2": 1, "3": 1}
    one, two, _ = begun(site)
    assert one[2] != two[2]
    assert one[3] != two[3]
    assert len({words[1] for words in begun(site)}) == 3
