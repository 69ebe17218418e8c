"""torchrun and mpirun start the same world as srun: losses of one device, signals, causes of failures."""

from __future__ import annotations

import shutil
import subprocess
import sys

import psutil
import pytest
from chaos import DATA, EVERY, Case
from cluster import PMIX
from test_jobs import SMALL, Site, losses, read

from hpc_parallel.record import attempts
from hpc_parallel.record.checkpoint_index import complete
from hpc_parallel.record.run_folder import RunFolder
from tests.waiting import wait_for
from tests.workers import Workers

pytestmark = [pytest.mark.slurm, pytest.mark.full, pytest.mark.timeout(600)]

ROOT = "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
PROGRAM = {"openmpi": "mpirun.openmpi", "mpich": "mpirun.mpich"}


def words_of(start: str, site: Site) -> list[str]:
    """The overrides that start a job this way; `mpirun` becomes the MPI that the test is about."""
    if start == "pmix" and PMIX is None:
        pytest.skip("libpmix2 is not installed: python tests/slurm/cluster.py install")
    if start in ("pmi2", "pmix"):
        return [f"+cluster.srun.mpi={start}"]
    if start == "torchrun":
        return ["cluster.start=torchrun"]
    if shutil.which(PROGRAM[start], path="/usr/bin:/bin") is None:
        pytest.skip(f"{PROGRAM[start]} is not installed: python tests/slurm/cluster.py install")
    wrapper = site.home / "bin" / "mpirun"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {PROGRAM[start]} "$@"\n')
    wrapper.chmod(0o755)
    return ["cluster.start=mpirun", f"launcher.setup=['{ROOT}','export PATH={wrapper.parent}:$PATH']"]


def test_the_line_of_the_guide_starts_the_ranks(site: Site, workers: Workers) -> None:
    """`mpirun -np 4 python -m hpc_parallel.worker RUN_FOLDER` in an allocation, on a folder made before."""
    if shutil.which(PROGRAM["openmpi"], path="/usr/bin:/bin") is None:
        pytest.skip("mpirun.openmpi is not installed: python tests/slurm/cluster.py install")
    words = ("strategy=hybrid", "nodes=2", "gpus_per_node=2", *SMALL, "run_dir=run", "launcher=script")
    made = site.run(*words, "launcher.snapshot=false")
    assert made.returncode == 0, made.stdout + made.stderr
    folder = site.home / "run"
    line = f"{PROGRAM['openmpi']} -np 4 {sys.executable} -m hpc_parallel.worker {folder}"
    script = site.home / "by_hand.sh"
    script.write_text(f"#!/bin/bash\n{ROOT} OMP_NUM_THREADS=1\n{line}\n")
    request = ("--wait", "--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1", "--output=by_hand.out")
    done = subprocess.run(
        ["sbatch", *request, script], cwd=site.home, env=site.environment,
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr + (site.home / "by_hand.out").read_text()
    alone = workers.train("strategy=single", *SMALL, "training.global_batch_size=16").losses
    assert losses(folder) == pytest.approx(alone, rel=1e-5)
    hosts = [rank["host"] for rank in read(folder, "environment.json")["ranks"]]
    assert hosts == ["n1", "n1", "n2", "n2"]


@pytest.mark.parametrize("start", ["openmpi", "torchrun", "mpich", "pmi2", "pmix"])
def test_each_start_reaches_the_same_world(start: str, site: Site, workers: Workers) -> None:
    words = ("strategy=hybrid", "nodes=2", "gpus_per_node=2", *SMALL, "run_dir=run", "launcher.wait=true")
    done = site.run(*words, *words_of(start, site))
    assert done.returncode == 0, done.stdout + done.stderr
    folder = site.home / "run"
    alone = workers.train("strategy=single", *SMALL, "training.global_batch_size=16").losses
    assert losses(folder) == pytest.approx(alone, rel=1e-5)
    ranks = read(folder, "environment.json")["ranks"]
    hosts = [rank["host"] for rank in ranks]
    assert len(ranks) == 4
    assert sorted(hosts) == ["n1", "n1", "n2", "n2"]
    assert hosts[0] == hosts[1]  # a node's ranks are neighbours
    log = "".join(path.read_text() for path in RunFolder(folder).slurm.glob("*.out"))
    assert "attempt 0 of job" in log
    assert "Job step may never run" not in log


@pytest.mark.parametrize("start", ["torchrun", "openmpi", "mpich"])
def test_signals_and_deaths(start: str, site: Site) -> None:
    """The signal before a time limit saves and requeues; a killed rank is named, and all start again."""
    words = ("strategy=data", "nodes=2", "gpus_per_node=1", *SMALL, "training.steps=100000", "run_dir=run")
    assert site.run(*words, *words_of(start, site)).returncode == 0
    folder = RunFolder(site.home / "run")
    job = str(read(folder.path, "owner.json")["job_id"])
    wait_for(lambda: folder.metrics.exists() and folder.metrics.stat().st_size > 0)
    batch = ["--batch"] if start != "torchrun" else []  # Slurm's own choice, by #SBATCH --signal
    site.cluster.run("scancel", "--signal=USR2", *batch, job)
    wait_for(lambda: site.record(job)["Restarts"] == "1" and site.record(job)["JobState"] == "RUNNING")
    saved = [checkpoint.step for checkpoint in complete(folder.checkpoints)]
    assert saved
    wait_for(lambda: folder.metrics.exists() and max(steps(folder), default=0) > saved[-1] + 2)
    victim = next(
        pid for host in ("n2",) for pid in site.cluster.pids(host)
        if "hpc_parallel.worker.main" in " ".join(command_line(pid))
    )  # fmt: skip
    psutil.Process(victim).kill()
    wait_for(lambda: len(attempts.starts(folder)) == 3)
    third = attempts.starts(folder)[-1].after_step or 0
    assert third >= saved[-1]
    wait_for(lambda: max(steps(folder), default=0) > third)
    site.cluster.run("scancel", job)
    assert site.ended(job)["Restarts"] == "1"
    ends = [(end.how, end.host) for end in attempts.ends(folder)]
    assert ends[:2] == [("time_limit", None), ("killed", "n2")]
    assert ends[2][0] == "cancelled"
    assert (len(ends), len(attempts.starts(folder))) == (3, 3)
    line = "the ranks start again in the same job, on the same hosts, 1 of 3\n"
    assert sum(log.read_text().count(line) for log in folder.slurm.glob("*.out")) == 1


@pytest.mark.parametrize("start", ["torchrun", "openmpi", "mpich"])
@pytest.mark.parametrize(
    ("nodes", "keys", "place"),
    [
        (DATA, "launcher.spares=1", "on the spare n3 in place of n2"),
        (
            ("strategy=data", "nodes=4"),
            "launcher.min_nodes=1",
            r"on 2 of 4 nodes \(failed: n2; waiting: n4\)",
        ),
    ],
)
def test_a_job_goes_on_without_a_lost_host(
    start: str, nodes: tuple[str, ...], keys: str, place: str, case: Case
) -> None:
    """The losses and the weights stay those of one device, up to the order of sums in float64."""
    job = case.submit(*nodes, keys, *words_of(start, case.site))
    case.reach(EVERY + 1, 60)
    case.lose("n2")
    case.assert_continued_in_place(job, place)


def test_the_job_after_a_shrink_has_all_nodes_again(case: Case) -> None:
    """It waits in the queue until the lost host is back."""
    cluster, folder = case.site.cluster, RunFolder(case.folder)
    job = case.submit("strategy=data", "nodes=4", "launcher.min_nodes=1")
    case.reach(EVERY + 1, 30)
    case.crawl_while.touch()
    case.lose("n2")
    case.until_started(2)
    assert folder.read_config()["nodes"] == 2
    kept = case.starts[-1].after_step or 0
    wait_for(lambda: case.step > kept + 2)
    case.note("requeued")
    cluster.run("scontrol", "requeue", job)
    wait_for(lambda: case.state(job) == "PENDING")
    assert len(case.starts) == 2
    case.crawl_while.unlink()
    cluster.mend("n2")
    cluster.boot("n2")
    assert case.ended(job) == "COMPLETED"
    case.assert_completed(restarts=2, lost=(0, 3 * EVERY))
    summary = read(case.folder, "summary.json")
    assert (summary["nodes"], summary["world_size"], folder.read_config()["nodes"]) == (4, 4, 4)
    assert (case.starts[2].after_step or 0) > kept  # what the two hosts computed counts


def steps(folder: RunFolder) -> list[int]:
    return [int(line.split(",")[0].split(":")[1]) for line in folder.metrics.read_text().splitlines()]


def command_line(pid: int) -> list[str]:
    try:
        return psutil.Process(pid).cmdline()
    except psutil.Error:
        return []
