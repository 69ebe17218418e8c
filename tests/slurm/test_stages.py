"""The stages of a study on a real Slurm: jobs that wait for each other, and what follows a failure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_jobs import SMALL, Site, read

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]
LINE = ("launcher=slurm", "launcher.snapshot=false", "launcher.cpus_per_device=2", "name=study")
# Passes once the file exists.
GATE = "import sys\nfrom pathlib import Path\nsys.exit(0 if Path(sys.argv[1]).exists() else 7)\n"


def jobs_of(site: Site) -> dict[str, str]:
    sweep = json.loads((site.home / "runs/sweeps/study/sweep.json").read_text())
    return {run["overrides"][0]: run["job_id"] for run in sweep["runs"]}


def folders_of(site: Site) -> dict[str, Path]:
    stages = json.loads((site.home / "runs/sweeps/study/stages.json").read_text())["stages"]
    return {stage["name"]: Path(stage["run_dir"]) for stage in stages}


@pytest.mark.usefixtures("beside_others")
def test_stages_are_jobs_that_wait_for_each_other(site: Site) -> None:
    """The second of three fails: the third never starts, and the same line starts only these two again."""
    (site.home / "gate.py").write_text(GATE)
    then = f"then={{gate: '-- gate.py {site.home}/open', report: report}}"
    line = (*LINE, *SMALL, then)
    done = site.run(*line)
    assert done.returncode == 0, done.stdout + done.stderr
    jobs, folders = jobs_of(site), folders_of(site)
    site.ended(jobs["report"])
    states = {name: site.record(job)["JobState"] for name, job in jobs.items()}
    assert states == {"run": "COMPLETED", "gate": "FAILED", "report": "CANCELLED"}
    assert not (folders["run"] / "report").exists()
    shown = site.command("status", "sweeps/study").stdout
    assert "report was not started, because gate failed: " in " ".join(shown.split())
    assert "exit code 7" in shown
    (site.home / "open").touch()
    again = site.run(*line)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "run         is done, and its inputs did not change" in again.stdout
    assert folders_of(site)["run"] == folders["run"]
    site.ended(jobs_of(site)["report"])
    outcomes = [read(folder, "summary.json")["outcome"] for folder in folders_of(site).values()]
    assert outcomes == ["completed"] * 3
    assert (folders["run"] / "report/index.html").exists()
    last = site.run(*line)
    assert last.stdout.count("is done, and its inputs did not change") == 3
    assert jobs_of(site)["report"] != jobs["report"]
