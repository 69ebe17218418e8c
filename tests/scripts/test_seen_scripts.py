"""What a user sees of a script while it runs and afterwards: `logs -f`, `status`, the plots of a report."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_parallel.report import plots
from hpc_parallel.report.gather import gather
from hpc_parallel.report.picture import Graphs
from tests.scripts.test_local_scripts import ROOT, TWO_NODES, command, run, started
from tests.waiting import wait_for

pytestmark = pytest.mark.processes
METRICS = r"script.metrics=step (?P<step>\d+) loss (?P<loss>[\d.]+)"
# Prints a step for each line of a file that grows.
STEPS = """
import os, sys, time
done = 0
while done < 4:
    time.sleep(0.05)
    asked = len(open(sys.argv[1]).read())
    for done in range(done + 1, asked + 1):
        print(f"step {done} loss {8 / done}", flush=True)
"""


def test_logs_follow_a_script_and_status_shows_its_last_line(home: Path) -> None:
    (home / "steps.py").write_text(STEPS)
    asked, shown = home / "asked", home / "shown"
    asked.write_text("..")
    process = started(home, *TWO_NODES, METRICS, "run_dir=runs/steps/1", "--", "steps.py", str(asked))
    follower = None
    try:
        out = home / "runs/steps/1/logs/rank-0.out"
        wait_for(lambda: out.exists() and "step 2" in out.read_text())
        with shown.open("w") as file:
            follower = subprocess.Popen(
                [sys.executable, "-m", "hpc_parallel", "logs", "steps/1", "-f"], cwd=home, stdout=file,
                env={**os.environ, "PYTHONPATH": ROOT},
            )  # fmt: skip
        wait_for(lambda: shown.read_text() == "step 1 loss 8.0\nstep 2 loss 4.0\n")
        (row,) = json.loads(command(home, "status", "--json"))
        assert (row["state"], row["last_line"]) == ("running", "step 2 loss 4.0")
        assert (row["time_left_s"], row["job_left_s"]) == (None, None)
        assert command(home, "status").splitlines()[-1] == "steps/1: step 2 loss 4.0"
        asked.write_text("....")
        assert process.wait(timeout=200) == 0
        assert follower.wait(timeout=200) == 0
    finally:
        for each in filter(None, (process, follower)):
            each.kill()
        process.communicate()
    lines = [f"step {step} loss {8 / step}" for step in (1, 2, 3, 4)]
    assert shown.read_text().splitlines() == lines


def test_a_report_draws_the_figures_of_scripts(home: Path) -> None:
    """Over their steps, if they tell no samples."""
    (home / "steps.py").write_text(STEPS)
    (home / "asked").write_text("....")
    words = ("-m", *TWO_NODES, METRICS, "script.arguments.lr=1,2", "hydra.sweep.dir=sweep")
    done = run(home, *words, "--", "steps.py", str(home / "asked"))
    assert done.returncode == 0, done.stdout + done.stderr
    command(home, "report", "sweep", "--output", "report")
    with (home / "report/report.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [(row["state"], row["final_loss"]) for row in table] == [("completed", "2.0")] * 2
    assert (home / "report/plots/loss.png").read_bytes().startswith(b"\x89PNG")
    (picture,) = plots.losses(gather([home / "sweep"]).rows)
    assert isinstance(picture.content, Graphs)
    ((_, (graph,)),) = picture.content.panels
    assert graph.x.name == "step"
    expected = [(1, 8), (2, 4), (3, 2.6666666666666665), (4, 2)]
    assert [curve.points for curve in graph.curves] == [expected] * 2
