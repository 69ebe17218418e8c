"""`-m` on a real Slurm: an array for each resource shape, counted in Slurm's records and calls of sbatch."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from chaos import EQUAL, EVERY, SLOW, TRAINING, heal
from cluster import Cluster
from test_jobs import SMALL, Site, losses, read, worker_of

from hpc_parallel.record.attempts import starts
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.sweep_folder import Sweep, read_sweep
from tests.parity import largest_difference
from tests.waiting import PATIENCE_S, wait_for
from tests.workers import Workers

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]  # beside tests of eight ranks

# Every call of sbatch leaves a line, then Slurm's own gets it.
COUNTED = """#!/bin/sh
printf '%s\\n' "$*" >> "$SBATCH_CALLS"
exec {sbatch} "$@"
"""


class CountedSite(Site):
    """A site on which calls of sbatch are counted."""

    @property
    def calls(self) -> list[str]:
        file = self.home / "calls"
        return file.read_text().splitlines() if file.exists() else []

    @property
    def environment(self) -> dict[str, str]:
        bin_ = self.home / "bin"
        path = f"{bin_}:{os.environ['PATH']}"
        return {**super().environment, "PATH": path, "SBATCH_CALLS": str(self.home / "calls")}


@pytest.fixture
def site(cluster: Cluster, tmp_path: Path) -> CountedSite:
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(COUNTED.format(sbatch=shutil.which("sbatch")))
    sbatch.chmod(0o755)
    return CountedSite(cluster, tmp_path)


def only_sweep(site: Site) -> tuple[Path, Sweep]:
    (folder,) = site.home.glob("runs/sweeps/*")
    return folder, read_sweep(folder)


def outcomes(sweep: Sweep) -> list[object]:
    return [read(run.run_dir, "summary.json")["outcome"] for run in sweep.runs]


def job_of(sweep: Sweep, *words: str) -> str:
    """The job of the run whose overrides have all these words."""
    (run,) = [run for run in sweep.runs if set(words) <= set(run.overrides)]
    assert run.job_id is not None
    return run.job_id


@pytest.mark.full
def test_a_sweep_is_one_array_for_each_shape_and_resumes_failed_runs(site: CountedSite) -> None:
    """A sweep of two strategies, with a shape that can't be: a batch of 16 over 5 devices."""
    shapes = 3
    words = ("-m", "strategy=data,pipeline", "nodes=1,2,4,5", *SMALL, "strategy.balance=parameters",
             "training.steps=30", "launcher=slurm", "launcher.max_restarts=0")  # fmt: skip
    started_s = time.monotonic()
    done = site.run(*words)
    took_s = time.monotonic() - started_s
    print(f"{took_s:.1f} s from Enter to the prompt")
    assert done.returncode == 0, done.stdout + done.stderr
    folder, sweep = only_sweep(site)
    # what can't be is told with its reason, and left out
    assert len(sweep.skipped) == 2
    assert all("nodes=5" in each.overrides for each in sweep.skipped)
    assert "skipped 2 combinations that can't run:" in done.stdout
    # an array of two runs for each shape, each run with its own nodes: Slurm's records
    assert len(site.calls) == shapes
    arrays = {job.partition("_")[0] for job in (run.job_id or "" for run in sweep.runs)}
    assert (len(arrays), len(sweep.runs)) == (shapes, 2 * shapes)
    for run in sweep.runs:
        assert run.job_id is not None
        record = site.record(run.job_id)
        assert (record["ArrayJobId"], record["ArrayTaskId"]) == tuple(run.job_id.split("_"))
        assert record["NumNodes"].partition("-")[0] == str(run.nodes)
        assert f"nodes={run.nodes}" in run.overrides
        assert re.search(rf"{run.run_dir.name} .* {run.nodes} +{run.job_id} ", done.stdout)
    # one is killed: its array's other run is not touched
    killed = next(run for run in sweep.runs if {"strategy=pipeline", "nodes=2"} <= set(run.overrides))
    worker = wait_for(lambda: worker_of(killed.run_dir, rank=1))
    worker.send_signal(signal.SIGKILL)
    for run in sweep.runs:
        site.ended(run.job_id or "")
    wait_for(lambda: all((run.run_dir / "summary.json").exists() for run in sweep.runs))
    outcomes = {run.run_dir: read(run.run_dir, "summary.json")["outcome"] for run in sweep.runs}
    assert [path for path, outcome in outcomes.items() if outcome != "completed"] == [killed.run_dir]
    assert "rank 1 on" in str(read(killed.run_dir, "failure.json")["line"])
    for run in sweep.runs:  # the job is known by the name that Slurm's commands take
        assert read(run.run_dir, "summary.json")["job_ids"] == [run.job_id]
        assert read(run.run_dir, "owner.json")["job_id"] == run.job_id
        assert (run.run_dir / "slurm" / f"{run.job_id}.out").exists()
    # and only that one is run again
    again = site.run("-m", f"sweep.resume={folder}", "sweep.wait=true")
    assert again.returncode == 0, again.stdout + again.stderr
    assert len(site.calls) == shapes + 1
    _, resumed = only_sweep(site)
    assert len(resumed.runs) == 2 * shapes
    changed = [new for old, new in zip(sweep.runs, resumed.runs, strict=True) if old != new]
    assert [run.overrides for run in changed] == [killed.overrides]
    assert read(changed[0].run_dir, "summary.json")["outcome"] == "completed"
    assert again.stdout.count("completed") >= 2 * shapes - 1
    nothing = site.run("-m", f"sweep.resume={folder}")
    assert (nothing.returncode, len(site.calls)) == (0, shapes + 1)
    assert f"nothing is missing in {folder}" in nothing.stdout


@pytest.mark.full
@pytest.mark.timing
def test_two_hundred_runs_of_four_shapes_are_four_calls(site: CountedSite) -> None:
    """Held, so that submitting is all that is done."""
    words = ("-m", "nodes=1,2,3,4", "seed=range(50)", "training.global_batch_size=12", *SMALL[1:],
             "training.steps=2", "launcher=slurm", "+launcher.extra.hold=true")  # fmt: skip
    started_s = time.monotonic()
    done = site.run(*words)
    took_s = time.monotonic() - started_s
    try:
        assert done.returncode == 0, done.stdout + done.stderr
        print(f"{took_s:.1f} s from Enter to the prompt")
        assert len(site.calls) == 4
        _, sweep = only_sweep(site)
        assert len({run.run_dir for run in sweep.runs}) == 200
        assert len({run.job_id for run in sweep.runs}) == 200
        arrays = sorted({(run.job_id or "").partition("_")[0] for run in sweep.runs}, key=int)
        for nodes, array in enumerate(arrays, start=1):
            record = site.record(array)
            assert (record["ArrayTaskId"], record["NumNodes"].partition("-")[0]) == ("0-49", str(nodes))
        linked = [run.run_dir / "code" for run in sweep.runs]
        assert all((code).is_dir() for code in linked)
    finally:
        site.cluster.run("scancel", "--name=data")
        wait_for(lambda: not site.cluster.run("squeue", "-h"))


@pytest.mark.full
def test_parallelism_limits_an_array(site: CountedSite) -> None:
    words = ("-m", "seed=1,2,3", *SMALL, "launcher=slurm", "sweep.parallelism=1", "sweep.wait=true")
    done = site.run(*words, timeout_s=300)
    assert done.returncode == 0, done.stdout + done.stderr
    _, sweep = only_sweep(site)
    assert sweep.parallelism == 1
    times = sorted(
        tuple(site.record(run.job_id or "")[key] for key in ("StartTime", "EndTime")) for run in sweep.runs
    )
    assert all(end <= start for (_, end), (start, _) in pairwise(times))
    assert "3 completed" in done.stdout.splitlines()


@pytest.mark.full
def test_a_run_of_an_array_that_is_behind_gives_its_place(site: CountedSite) -> None:
    """The fifth begins when three of the others have ended. It goes on only if it is resumed by itself."""
    rates = "optimizer.learning_rate=1e-2,2e-2,5e-3,4e-3,1e-7,3e-3"
    done = site.run(
        "-m", "launcher=slurm", "launcher.snapshot=false", "sweep.pack=off", "sweep.parallelism=2", *SMALL,
        rates, "sweep.prune=median", "training.validate_every=2", "optimizer.warmup_steps=0",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    folder, sweep = only_sweep(site)
    assert len(site.calls) == 1
    for run in sweep.runs:
        assert site.ended(run.job_id or "")["JobState"] == "COMPLETED"  # a pruned run is no failure
    assert outcomes(sweep)[4] == "pruned"
    behind = sweep.runs[4].run_dir
    assert str(read(behind, "summary.json")["ended_early"]).startswith("pruned at step ")
    assert "nothing is missing in " in site.run("-m", f"sweep.resume={folder}").stdout
    resumed = site.run(f"resume={behind}", "launcher=slurm", "launcher.wait=true")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert outcomes(sweep)[4] == "completed"


@pytest.mark.usefixtures("beside_others")
def test_a_shape_that_can_never_start_is_refused_and_the_others_stay(site: Site) -> None:
    (site.home / "show.py").write_text("print('shown')\n")
    done = site.run("-m", "nodes=1,8", "seed=1,2", "launcher=slurm", "--", "show.py")
    assert done.returncode == 3
    assert "nodes=8 gpus_per_node=1 (nodes=8 seed=1 and 1 more): Slurm refused the job" in done.stderr
    folder, sweep = only_sweep(site)
    assert [(run.nodes, run.job_id is None, run.run_dir.exists()) for run in sweep.runs] == [
        (1, False, True), (1, False, True), (8, True, False), (8, True, False),
    ]  # fmt: skip
    for run in sweep.runs[:2]:
        assert site.ended(run.job_id or "")["JobState"] == "COMPLETED"
    lines = [line.strip() for line in done.stdout.splitlines() if line.startswith("  python -m")]
    words = [f"python -m hpc_parallel {word}" for word in
             (f"status sweeps/{folder.name} --watch", f"cancel sweeps/{folder.name}")]  # fmt: skip
    assert lines[:2] == words
    followed = site.pasted(words[0])
    assert (followed.returncode, followed.stdout.count("its folder is gone: nodes=8")) == (0, 2)


@pytest.mark.full
def test_a_requeued_task_goes_on_in_its_own_folder(site: CountedSite) -> None:
    words = ("-m", "seed=1,2", *SMALL, "training.steps=100000", "launcher=slurm", "name=tasks")
    assert site.run(*words).returncode == 0
    _, sweep = only_sweep(site)
    first, _ = sweep.runs
    wait_for((first.run_dir / "metrics.jsonl").exists)
    site.cluster.run("scontrol", "requeue", first.job_id or "")
    wait_for(lambda: (first.run_dir / "attempts.jsonl").read_text().count('"began"') == 2)
    began = [json.loads(line) for line in (first.run_dir / "attempts.jsonl").read_text().splitlines()]
    starts = [line for line in began if "began" in line]
    assert [line["job_id"] for line in starts] == [first.job_id, first.job_id]
    assert starts[1]["after_step"] > 0
    refused = subprocess.run(
        [sys.executable, "-m", "hpc_parallel.run", f"resume={first.run_dir}"],
        cwd=site.home, env=site.environment, capture_output=True, text=True,
    )  # fmt: skip
    site.cluster.run("scancel", "--name=tasks")
    assert refused.returncode == 2
    assert f"is going on already, as job {first.job_id}" in refused.stderr


@pytest.mark.full
def test_another_sweeper_waits_for_its_jobs_and_learns_their_figures(site: CountedSite) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="hydra-optuna-sweeper is not installed")
    words = ("-m", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", *SMALL, "launcher=slurm",
             "optimizer.learning_rate=interval(1e-4,1e-2)")  # fmt: skip
    refused = site.run(*words, "launcher.partition=gone", "hydra.sweeper.n_jobs=1")
    assert refused.returncode == 3, refused.stdout + refused.stderr
    assert "invalid partition" in refused.stderr
    assert not list(site.home.glob("runs/*/*"))
    done = site.run(*words, "sweep.objective=validation_loss", "training.validate_every=10")
    assert done.returncode == 0, done.stdout + done.stderr
    folder, sweep = only_sweep(site)
    summaries = [read(run.run_dir, "summary.json") for run in sweep.runs]
    assert [summary["job_ids"] for summary in summaries] == [[run.job_id] for run in sweep.runs]
    assert summaries[0]["ended"] < summaries[1]["started"]
    best = re.search(r"^best_value: (.*)$", (folder / "optimization_results.yaml").read_text(), re.MULTILINE)
    assert best is not None
    assert float(best[1]) == min(summary["validation_loss"] for summary in summaries)


@pytest.mark.full
@pytest.mark.parametrize(
    ("key", "place"),
    [
        ("launcher.spares=1", "on the spare n3 in place of n2"),
        ("launcher.min_nodes=1", "on 1 of 2 nodes (failed: n2)"),
    ],
)
def test_the_runs_of_an_array_go_on_without_a_lost_host(
    key: str, place: str, site: CountedSite, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tasks share the hosts. Each goes on in its job, with the losses of one device."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))  # the model of the tests
    words = ("-m", "strategy=data", "nodes=2", key, "optimizer.learning_rate=0.001,0.002", "launcher=slurm")
    done = site.run(*words, *TRAINING, *SLOW)
    try:
        assert done.returncode == 0, done.stdout + done.stderr
        _, sweep = only_sweep(site)
        jobs = {RunFolder(run.run_dir): run.job_id or "" for run in sweep.runs}
        wait_for(lambda: all(saved(folder) for folder in jobs))
        site.cluster.cut("n2")
        site.cluster.kill("n2")
        for job in jobs.values():
            assert site.ended(job, within_s=2 * PATIENCE_S)["JobState"] == "COMPLETED"
    finally:
        heal(site)
    assert len(site.calls) == 1
    assert {job.partition("_")[2] for job in jobs.values()} == {"0", "1"}
    for run, (folder, job) in zip(sweep.runs, jobs.items(), strict=True):
        assert (site.record(job)["Restarts"], len(starts(folder))) == ("0", 2)
        log = (folder.slurm / f"{job}.out").read_text().splitlines()
        assert f"the ranks start again in the same job, {place}, 1 of 3" in log
        rate = next(word for word in run.overrides if "learning_rate" in word)
        alone = workers.train("strategy=single", *TRAINING, rate).losses
        assert largest_difference(losses(folder.path), alone) < EQUAL


def saved(folder: RunFolder) -> bool:
    return (folder.checkpoints / f"step-{EVERY}").exists()
