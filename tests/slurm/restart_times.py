"""How long a run stands still after a rank was killed, on the four hosts of the test cluster.

    PYTHONPATH=. python tests/slurm/restart_times.py [TIMES]

Each run has a fresh start (from its first process to its first step), a start in place (from the kill of a
rank to the next step), and what the second failure of a host causes: a requeue, a spare, or fewer nodes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from cluster import Cluster
from test_jobs import SMALL, Site, worker_of

from tests.waiting import wait_for

AFTER_TWO = {
    "requeue": (), "spare": ("launcher.spares=1",), "fewer nodes": ("launcher.min_nodes=2",),
    "requeue, standby": ("launcher.standby=true",),
}  # fmt: skip
WORDS = (
    "strategy=data", "nodes=3", *SMALL, "training.steps=100000", "training.global_batch_size=6",
    "training.checkpoint_every=20", "training.validate_every=null", "strategy.verify=never",
    "model._target_=tests.models.Slow", "+model.pause_s=0.1", "launcher.check_imports=false",
    "launcher=slurm",
)  # fmt: skip


def seconds_of_one_run(site: Site, folder: Path, following: str) -> dict[str, float]:
    """Seconds of each start by its kind. following: a key of AFTER_TWO."""
    submitted = site.run(*WORDS, *AFTER_TWO[following], f"run_dir={folder}")
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    job = json.loads((folder / "owner.json").read_text())["job_id"]
    last = list(site.cluster.hosts)[2]  # without the batch script, so the first process there is a rank's
    wait_for(lambda: len(site.cluster.pids(last)) > 1)
    found = {"fresh": seconds_until(lambda: step_of(folder) > 0)}
    in_place = "in place, standby" if "launcher.standby=true" in AFTER_TWO[following] else "in place"
    for kind in (in_place, following):
        before = step_of(folder)
        wait_for(
            lambda before=before: step_of(folder) > before + 100
        )  # past a checkpoint, and standby's imports
        worker = worker_of(folder, rank=2)
        assert worker is not None
        began = starts_of(folder)
        worker.send_signal(signal.SIGKILL)
        found[kind] = seconds_until(lambda began=began: steps_since_start(folder, began + 1))
    assert site.record(job)["Restarts"] == str(int(following.startswith("requeue")))
    site.cluster.run("scancel", job)
    site.ended(job)
    return found


def seconds_until(condition: Callable[[], bool]) -> float:
    began = time.monotonic()
    wait_for(condition, within_s=600)
    return time.monotonic() - began


def step_of(folder: Path) -> int:
    lines = (folder / "metrics.jsonl").read_text().split("\n")[:-1] if has_metrics(folder) else []
    return json.loads(lines[-1])["step"] if lines else 0


def has_metrics(folder: Path) -> bool:
    return (folder / "metrics.jsonl").exists()


def starts_of(folder: Path) -> int:
    return (folder / "attempts.jsonl").read_text().count('"began"')


def steps_since_start(folder: Path, number: int) -> bool:
    """Whether this start has logged a step. It removes the lines of those that it trains again."""
    starts = [line for line in (folder / "attempts.jsonl").read_text().splitlines() if '"began"' in line]
    return len(starts) == number and step_of(folder) > json.loads(starts[-1])["after_step"]


def main() -> None:
    times = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])  # the tests' own model
    with Cluster.start() as cluster, tempfile.TemporaryDirectory() as home:
        site = Site(cluster, Path(home))
        rows: dict[str, list[float]] = {}
        for number, following in enumerate([*AFTER_TWO] * times):
            seconds = seconds_of_one_run(site, Path(home) / f"run{number}", following)
            for name, value in seconds.items():
                rows.setdefault(name, []).append(value)
            print(*(f"{name} {value:.1f} s" for name, value in seconds.items()), flush=True)
    for name, values in rows.items():
        print(f"{name}: median {median(values):.1f} s of {len(values)}")


if __name__ == "__main__":
    main()
