"""`sweep.pack=auto` on a real Slurm: runs are steps of one job of whole nodes, each with its own outcome."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_jobs import SMALL, Site, losses, read
from test_sweeps import only_sweep, outcomes

from hpc_parallel.record.sweep_folder import read_sweep
from tests.waiting import PATIENCE_S, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]
PACKED = ("-m", "launcher=slurm", "launcher.snapshot=false", "launcher.cpus_per_device=4", "sweep.pack=auto")
# Notes its start with its step and its GPU, and ends as its number says.
SCRIPT = """
import os, sys, time
from pathlib import Path
number, home = int(sys.argv[1]), Path(sys.argv[2])
step = f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
with (home / "begun").open("a") as file:
    print(number, step, os.environ["CUDA_VISIBLE_DEVICES"], os.environ["MASTER_PORT"], file=file)
while number < 3 and not (home / f"go{number}").exists():
    time.sleep(0.1)
sys.exit(7 if number == 1 else 0)
"""

# Of 40 runs: 1 to 3 fail, 4 hangs, 5 waits for `cancel`, 6 and 7 save at each time limit until they may end.
MANY = """
import os, sys, time
from pathlib import Path
from hpc_parallel import job_context
number, home = int(sys.argv[1]), Path(sys.argv[2])
with (home / "begun").open("a") as file:
    print(number, f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}", file=file)
if number < 4:
    sys.exit(7)
for step in range(10**6):
    if job_context.stop_requested(step):
        print("saved", flush=True)
        sys.exit(0)
    if number == 4 and step == 1:
        time.sleep(10**6)
    if step > 20 and number not in (5, 6, 7) or number in (6, 7) and (home / "end").exists():
        break
    print(step, flush=True)
    time.sleep(0.1)
with (home / "done").open("a") as file:
    print(number, file=file)
"""

# Waits until all eight have begun: runs one after another would never end.
SHARING = """
import os, sys, time
from pathlib import Path
home = Path(sys.argv[1])
words = (os.environ[name] for name in ("SLURM_STEP_ID", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"))
with (home / "begun").open("a") as file:
    print(*words, file=file)
while len((home / "begun").read_text().splitlines()) < 8:
    time.sleep(0.1)
"""


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


@pytest.mark.full
def test_at_the_time_limit_all_save_and_the_job_goes_on_with_what_is_left(site: Site) -> None:
    long = [word for word in SMALL if not word.startswith("training.steps")]
    words = (*PACKED, "seed=1,2,3", *long, "training.steps=100000", "launcher.time_minutes=1")
    assert site.run(*words, "sweep.pack_minutes=10").returncode == 0
    folder, sweep = only_sweep(site)
    (job,) = {run.job_id or "" for run in sweep.runs}
    for run in sweep.runs[:2]:
        wait_for((run.run_dir / "metrics.jsonl").exists)
    site.cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=1")
    wait_for(lambda: site.record(job)["Restarts"] == "1", within_s=2 * PATIENCE_S)
    site.cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=10")
    wait_for(lambda: sum(len(marks(run.run_dir, "began")) for run in sweep.runs) == 4)
    starts = [marks(run.run_dir, "began") for run in sweep.runs]
    assert [len(begun) for begun in starts] == [2, 2, 0]  # those that had begun come first again
    assert all(start["after_step"] > 0 for start in (starts[0][1], starts[1][1]))
    assert [marks(run.run_dir, "ended")[0]["how"] for run in sweep.runs[:2]] == ["time_limit"] * 2
    assert site.command("cancel", str(folder), "--yes").returncode == 0
    assert site.ended(job)["Restarts"] == "1"
    assert outcomes(sweep) == ["cancelled"] * 3


@pytest.mark.full
@pytest.mark.timeout(2400)
def test_of_40_runs_each_has_its_own_outcome_and_none_runs_twice(site: Site) -> None:
    """Three fail, one hangs, one is cancelled; the time limit comes twice, and the follower is killed."""
    (site.home / "own.py").write_text(MANY)
    keys = ("seed=range(1,41)", "sweep.pack_nodes=2", "launcher.time_minutes=5", "sweep.pack_minutes=60",
            "launcher.max_restarts=0", "cluster.hang_timeout_s=30")  # fmt: skip
    follower = site.follow(*PACKED, *keys, "sweep.wait=true", "--", "own.py", "{seed}", str(site.home))
    try:
        wait_for(lambda: len(begun(site)) >= 4)
    finally:
        follower.kill()
        follower.communicate()
    _, sweep = only_sweep(site)
    (job,) = {run.job_id or "" for run in sweep.runs}
    busy = Counter[int]()  # places in use -> how often Slurm said so

    def look(what: Callable[[], bool]) -> bool:
        steps = site.cluster.run("squeue", "-h", "-s", "-o", "%i", "-j", job).split()
        busy[sum(step.split(".")[1].isdigit() for step in steps)] += 1
        return what()

    wait_for(lambda: look(lambda: {"4", "5", "6"} <= {words[0] for words in begun(site)}))
    cancelled = site.command("cancel", str(sweep.runs[4].run_dir), "--yes")
    assert cancelled.returncode == 0, cancelled.stderr
    wait_for(lambda: look((sweep.runs[3].run_dir / "summary.json").exists))
    for limit, enough in ((1, 4), (2, 12)):
        wait_for(lambda: look(lambda: len(done(site)) >= enough), within_s=600)  # noqa: B023
        site.cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=1")
        wait_for(lambda: int(site.record(job)["Restarts"]) >= limit, within_s=400)  # noqa: B023
        site.cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    wait_for(lambda: look(lambda: len(done(site)) >= 33), within_s=900)
    (site.home / "end").touch()
    site.ended(job, within_s=600)
    assert outcomes(sweep) == [*["failed"] * 4, "cancelled", *["completed"] * 35]
    kinds = [read(run.run_dir, "failure.json")["kind"] for run in sweep.runs[:4]]
    assert kinds == ["error"] * 3 + ["hang"]
    assert Counter(done(site)) == Counter(range(6, 41))
    begins = Counter(int(words[0]) for words in begun(site))
    stops = {at: len(limits(run.run_dir)) for at, run in enumerate(sweep.runs, start=1)}
    assert stops[6] == stops[7] == 2
    # Another start only after the time limit, which may have come before the script began.
    assert all(1 <= begins[number] <= 1 + stops[number] for number in stops), (begins, stops)
    assert max(busy) == 4  # places
    used = sum(gpus * times for gpus, times in busy.items()) / (4 * busy.total())
    print(
        f"{used:.2f} of the places were in use, in {busy.total()} answers of squeue: {sorted(busy.items())}"
    )


def done(site: Site) -> list[int]:
    file = site.home / "done"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def limits(folder: Path) -> list[dict[str, Any]]:
    return [end for end in marks(folder, "ended") if end["how"] == "time_limit"]


def marks(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of one kind in `attempts.jsonl`."""
    lines = map(json.loads, (folder / "attempts.jsonl").read_text().splitlines())
    return [line for line in lines if kind in line]


@pytest.mark.full
def test_only_what_failed_is_packed_again(site: Site) -> None:
    again = "import sys\nfrom pathlib import Path\nfile = Path(sys.argv[1])\nnew = not file.exists()\n"
    (site.home / "own.py").write_text(f"{again}file.touch()\nsys.exit(new and file.name == '2')\n")
    words = (*PACKED, "seed=1,2,3", "sweep.pack_minutes=180", "sweep.wait=true")
    failed = site.run(*words, "--", "own.py", f"{site.home}/{{seed}}")
    assert "2 completed, 1 failed" in failed.stdout, failed.stdout + failed.stderr
    folder, sweep = only_sweep(site)
    done = site.run("-m", f"sweep.resume={folder}", "sweep.wait=true")
    assert done.returncode == 0, done.stdout + done.stderr
    _, resumed = only_sweep(site)
    jobs = [(run.job_id, before.job_id) for run, before in zip(resumed.runs, sweep.runs, strict=True)]
    assert [new == old for new, old in jobs] == [True, False, True]
    assert len({job for pair in jobs for job in pair}) == 2
    assert outcomes(resumed) == ["completed"] * 3


@pytest.mark.full
def test_trainings_side_by_side_equal_one_device(site: Site, alone: Callable[..., list[float]]) -> None:
    """A run of two nodes shares both with two runs of one node, and each is the training of one device."""
    layouts = ("strategy=data", "nodes=1,2", "gpus_per_node=1,2", "launcher.cpus_per_device=2")
    words = ("-m", "launcher=slurm", "sweep.pack=auto", "sweep.pack_minutes=200", *layouts, *SMALL)
    done = site.run(*words, "sweep.wait=true")
    assert done.returncode == 0, done.stdout + done.stderr
    _, sweep = only_sweep(site)
    (job,) = {run.job_id for run in sweep.runs}
    assert site.record(job or "")["NumNodes"] == "2"
    for run in sweep.runs:
        assert losses(run.run_dir) == pytest.approx(alone(*SMALL), rel=1e-5)
        hosts = [rank["host"] for rank in read(run.run_dir, "environment.json")["ranks"]]  # type: ignore[attr-defined]
        assert sorted(Counter(hosts).values()) == [run.gpus_per_node] * run.nodes


@pytest.mark.full
def test_a_run_that_is_behind_gives_its_place_to_the_next(site: Site) -> None:
    """The fifth begins when three of the others have ended; nobody follows the sweep."""
    rates = "optimizer.learning_rate=1e-2,2e-2,5e-3,4e-3,1e-7,3e-3"
    words = (
        *PACKED,
        *SMALL,
        rates,
        "sweep.prune=median",
        "training.validate_every=2",
        "optimizer.warmup_steps=0",
    )
    done = site.run(*words, "sweep.pack_minutes=600")
    assert done.returncode == 0, done.stdout + done.stderr
    folder, sweep = only_sweep(site)
    (job,) = {run.job_id or "" for run in sweep.runs}
    assert site.ended(job)["JobState"] == "COMPLETED"  # a pruned run is no failure
    assert outcomes(sweep)[4] == "pruned"
    behind = sweep.runs[4].run_dir
    assert str(read(behind, "summary.json")["ended_early"]).startswith("pruned at step ")
    states = json.loads(site.command("status", "--json", str(behind)).stdout)
    assert [each["state"] for each in states] == ["pruned"]
    assert not (behind / "failure.json").exists()
    resumed = site.run("-m", f"sweep.resume={folder}")
    assert "nothing is missing in " in resumed.stdout


@pytest.mark.full
def test_runs_that_share_a_gpu_equal_one_that_has_it_alone(
    site: Site, alone: Callable[..., list[float]]
) -> None:
    """All begin at once, two on each GPU of one node; a training beside others is that of one device."""
    (site.home / "own.py").write_text(SHARING)
    shared = ("sweep.runs_per_gpu=2", "plan.on_overflow=off", "launcher.cpus_per_device=2", "sweep.wait=true")
    words = ("-m", "launcher=slurm", "launcher.snapshot=false", "sweep.pack=auto", *shared)
    ended = site.run(*words, "seed=range(8)", "--", "own.py", str(site.home))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert sorted(words[1] for words in begun(site)) == [*"00112233"]
    assert {words[2] for words in begun(site)} == {"1"}  # threads
    assert len({words[0] for words in begun(site)}) == 8
    ended = site.run(*words, "strategy=single", "name=a,b,c,d,e", *SMALL, "hydra.sweep.dir=trainings")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for run in read_sweep(site.home / "trainings").runs:
        assert losses(run.run_dir) == pytest.approx(alone(*SMALL), rel=1e-5)
