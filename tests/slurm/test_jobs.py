"""`python -m hpc_parallel.run` on a real Slurm: jobs complete, equal the local curve, and fail clearly."""

from __future__ import annotations

import json
import os
import pickletools
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import psutil
import pytest
from cluster import Cluster

from hpc_parallel.record import owner
from hpc_parallel.record.attempts import starts
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import read_json
from tests.marks import in_full
from tests.waiting import PATIENCE_S, wait_for
from tests.workers import Workers

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

# Of a shell inside an interactive job of another size, at a site with defaults for Slurm's commands.
SHELL = {
    "SLURM_MEM_PER_CPU": "100", "SLURM_MEM_PER_NODE": "100", "SLURM_NTASKS_PER_NODE": "3",
    "SBATCH_TIMELIMIT": "1", "SBATCH_NO_REQUEUE": "1", "SBATCH_SIGNAL": "TERM@30",
    "SBATCH_ARRAY_INX": "0-2", "SBATCH_ERROR": "/dev/null", "SBATCH_WAIT": "1", "SLURM_TIME_FORMAT": "%s",
    "SQUEUE_FORMAT": "%T", "SQUEUE_PARTITION": "none", "SQUEUE_STATES": "BOOT_FAIL", "SACCT_FORMAT": "State",
    "SCANCEL_PARTITION": "none", "SCANCEL_STATE": "SUSPENDED", "SINFO_PARTITION": "none",
}  # fmt: skip
SMALL = (
    "training.steps=10",
    "training.log_every=1",
    "training.precision=float32",  # the hosts of the tests claim GPUs, whose default is bfloat16
    "training.validation_samples=32",
    "data.max_bytes=300000",
    "data.sequence_length=32",
    "model.layers=4",
    "model.dim=64",
    "model.ffn_dim=160",
    "optimizer.warmup_steps=2",
)
ONCE = ("launcher.max_restarts=0",)
SMALL_IMAGES = (
    "training.steps=10",
    "training.log_every=1",
    "training.precision=float32",
    "model=segmenter",
    "model.channels=[8,12,16]",
    "data=cells",
    "data.samples=64",
    "data.height=32",
    "data.width=48",
    "optimizer.warmup_steps=2",
)


@dataclass(frozen=True)
class Site:
    """A user's shell on the login node, in a folder of its own."""

    cluster: Cluster
    home: Path

    def run(
        self, *words: str, module: str = "hpc_parallel.run", timeout_s: float = 400, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """The command of the project, with stdout and stderr apart."""
        return subprocess.run(
            [sys.executable, "-m", module, *words], cwd=self.home, env=self.environment | SHELL | variables,
            capture_output=True, text=True, timeout=timeout_s,
        )  # fmt: skip

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.run(*words, module="hpc_parallel")

    def pasted(self, line: str) -> subprocess.CompletedProcess[str]:
        """A line that the project printed, as a shell takes it."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return subprocess.run(
            ["bash", "-c", line], cwd=self.home, env={**self.environment, "PATH": path},
            capture_output=True, text=True, timeout=240,
        )  # fmt: skip

    def follow(self, *words: str) -> subprocess.Popen[str]:
        """The command with `launcher.wait`, running; its stdout is to be read."""
        return subprocess.Popen(
            [sys.executable, "-m", "hpc_parallel.run", *words, "launcher=slurm", "launcher.wait=true"],
            cwd=self.home, env=self.environment, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, **self.cluster.environment}

    def record(self, job_id: str) -> dict[str, str]:
        return self.cluster.job(job_id)

    def ended(self, job_id: str, *, within_s: float = PATIENCE_S) -> dict[str, str]:
        live = ("PENDING", "RUNNING", "COMPLETING")
        wait_for(lambda: self.record(job_id)["JobState"] not in live, within_s=within_s)
        return self.record(job_id)


def read(folder: Path, name: str) -> dict[str, object]:
    return json.loads((folder / name).read_text())


def is_over(folder: Path) -> bool:
    """Whether the run has ended and won't start again: between two starts, its summary says `preempted`."""
    summary = read_json(folder / "summary.json")
    return summary is not None and summary["outcome"] != "preempted"


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def only_run(site: Site) -> Path:
    (folder,) = site.home.glob("runs/*/*")
    return folder


@pytest.mark.usefixtures("beside_others")
@pytest.mark.timeout(1600)  # eight ranks on two cores
@pytest.mark.parametrize(
    ("words", "small", "hosts", "ranks"),
    [
        (("strategy=pipeline", "nodes=2"), SMALL, 2, 2),
        *in_full(
            [
                (("strategy=pipeline", "nodes=4"), SMALL, 4, 4),
                (("strategy=data", "nodes=2", "gpus_per_node=2"), SMALL, 2, 4),
                (("strategy=hybrid", "nodes=4", "gpus_per_node=2"), SMALL, 4, 8),  # pipeline 4 x tensor 2
                (("strategy=tile", "nodes=4"), SMALL_IMAGES, 4, 4),  # 2 x 2 tiles
            ]
        ),
    ],
)
def test_a_job_completes_and_equals_the_local_curve(
    site: Site,
    alone: Callable[..., list[float]],
    words: tuple[str, ...],
    small: tuple[str, ...],
    hosts: int,
    ranks: int,
) -> None:
    # NONE: the kept code is what runs nevertheless. One thread for each rank, which no variable says then.
    line = (*words, *small, "cluster.cpus_per_device=1", "launcher=slurm", "launcher.wait=true")
    done = site.run(*line, timeout_s=1500, SBATCH_EXPORT="NONE")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = only_run(site)
    summary = read(folder, "summary.json")
    (job_id,) = summary["job_ids"]
    record = site.record(job_id)
    assert (record["JobState"], record["NumNodes"], record["NumTasks"]) == (
        "COMPLETED",
        str(hosts),
        str(ranks),
    )
    assert (record["TimeLimit"], record["Requeue"]) == ("01:00:00", "1")
    assert re.fullmatch(rf"gres[:/]gpu:{ranks // hosts}", record["TresPerNode"])
    assert summary["outcome"] == "completed"
    assert summary["world_size"] == ranks
    # Every rank says where it is; by the network's own addresses there are as many hosts as asked for.
    first_lines = [(folder / "logs" / f"rank-{rank}.out").read_text().split("\n")[0] for rank in range(ranks)]
    places = {line.split(" on ")[1].split(",")[0] for line in first_lines}
    addresses = set(site.cluster.hosts.items())
    assert places <= {f"{host} ({address})" for host, address in addresses}
    assert len(places) == hosts
    environment = read(folder, "environment.json")
    assert {(rank["host"], rank["address"]) for rank in environment["ranks"]} <= addresses
    assert environment["fabric"]["GLOO_SOCKET_IFNAME"] == "fabric0"
    transport = environment["transport"]
    assert (transport["backend"], transport["expected"], transport["problem"]) == ("gloo", "tcp", None)
    assert len(transport["devices"]) == hosts
    assert environment["slurm"]["SLURM_JOB_ID"] == job_id
    assert losses(folder) == pytest.approx(alone(*small), rel=1e-5)


@pytest.mark.full
def test_a_required_fabric_that_is_not_there_stops_the_job(site: Site) -> None:
    words = ("strategy=data", "nodes=2", "cluster.fabric=infiniband", "fabric.require=true", "run_dir=strict")
    done = site.run(*words, *SMALL, "launcher.wait=true")
    assert done.returncode == 1
    last = done.stdout.splitlines()[-1]
    assert "gloo sends between nodes through sockets, and the fabric should be infiniband" in last, last
    assert "(no active device on n" in last
    assert not (site.home / "strict" / "metrics.jsonl").exists()


@pytest.mark.full
def test_a_proof_goes_through_slurm(site: Site) -> None:
    """Losses, gradients and weights of a job on two hosts against those of a job on one."""
    words = ("strategy=tile", "nodes=2", *SMALL_IMAGES, "precision=float64", "run_dir=proof")
    done = site.command("parity", *words, "launcher=slurm", "launcher.wait=true")
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = read(site.home / "proof", "parity.json")["rows"]
    assert (row["word"], row["layout"]) == ("equal", "tile 2")
    assert all(difference["value"] < 1e-9 for difference in row["differences"].values())
    (folder,) = site.home.glob("proof/01-*")
    assert read(folder, "summary.json")["job_ids"]


PYTHON = """#!/bin/sh
case "$*" in *submitit.core._submit*) echo "$CONDA_PREFIX" >> {calls} ;; esac
exec {python} "$@"
"""
HOOK = """
conda() { [ "$1" = activate ] && [ -d "$2/conda-meta" ] && export CONDA_PREFIX="$2" PATH="$2/bin:$PATH"; }
"""


def conda_environment(base: Path, *, calls: Path) -> Path:
    """An environment `torch` with the hook that `conda activate` needs, and a Python that takes notes."""
    folder = base / "envs" / "torch"
    for place in (base / "etc/profile.d", base / "bin", folder / "bin", folder / "conda-meta"):
        place.mkdir(parents=True)
    (base / "etc/profile.d/conda.sh").write_text(HOOK)
    (base / "bin/conda").touch(mode=0o755)
    python = folder / "bin/python"
    python.write_text(PYTHON.format(calls=shlex.quote(str(calls)), python=shlex.quote(sys.executable)))
    python.chmod(0o755)
    return folder


@pytest.mark.usefixtures("beside_others")
def test_submission_prints_job_folder_and_commands_and_conda_is_activated(site: Site) -> None:
    base, calls = site.home / "my conda", site.home / "calls"
    environment = conda_environment(base, calls=calls)
    words = ("strategy=data", "nodes=2", *SMALL, "training.steps=2", "launcher.conda=torch")  # launcher=auto
    done = site.run(*words, CONDA_EXE=str(base / "bin/conda"))
    assert done.returncode == 0, done.stderr
    assert "launcher slurm: sbatch is here and Slurm's controller answers" in done.stdout
    folder = only_run(site)
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if line[:6].strip())
    job_id = lines["job"]
    assert lines["cancel"] == f"python -m hpc_parallel cancel data/{folder.name}"
    assert lines["follow"] == f"python -m hpc_parallel logs data/{folder.name} --follow"
    followed = site.pasted(lines["follow"])
    assert (followed.returncode, "rank 0 of 2" in followed.stdout) == (0, True)
    assert str(folder) in done.stdout
    assert folder.stat().st_mode & 0o777 == 0o700
    assert site.ended(job_id)["JobState"] == "COMPLETED"
    assert read(folder, "summary.json")["outcome"] == "completed"
    assert calls.read_text().splitlines() == [str(environment)] * 2
    # what Slurm was given is what is kept, and what the payload holds is a name and a path
    kept = site.cluster.run("scontrol", "write", "batch_script", job_id, "-")
    assert (folder / "batch_script.sh").read_text().strip() == kept.strip()
    payload = (folder / "slurm" / f"{job_id}_submitted.pkl").read_bytes()
    names = [argument for _, argument, _ in pickletools.genops(payload) if isinstance(argument, str)]
    assert "hpc_parallel.job" in names
    assert str(folder) in names
    assert not any("cloudpickle" in name for name in names)  # nothing pickled by value


@pytest.mark.usefixtures("beside_others")
def test_dry_run_prints_the_submitted_script(site: Site) -> None:
    words = ("strategy=pipeline", "nodes=2", *SMALL, "run_dir=runs/same/one", "name=dry",
             "+launcher.extra.hold=true")  # fmt: skip
    shown = site.run(*words, "launcher=slurm", "dry_run=true")
    assert shown.returncode == 0
    assert not (site.home / "runs").exists()
    assert not site.cluster.run("squeue", "-h", "--states=PD,R", "--name=dry")
    done = site.run(*words, "launcher=slurm")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (site.home / "runs/same/one/batch_script.sh").read_text().strip() == shown.stdout.strip()


def hand_submitted(site: Site) -> tuple[str, str]:
    """State and job id of the site's only run, as `status` has them."""
    (row,) = json.loads(site.command("status", "--json").stdout)
    return row["state"], row["job_id"]


@pytest.mark.usefixtures("beside_others")
def test_a_written_script_runs_by_sbatch(site: Site, alone: Callable[..., list[float]]) -> None:
    awkward = 'runs/a "quoted" $(touch pwned) name'
    done = site.run("strategy=data", "nodes=2", *SMALL, "launcher=script", f"run_dir='{awkward}'")
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("submit"))
    sbatch, script = shlex.split(line.removeprefix("submit"))
    job_id = site.cluster.run(sbatch, "--parsable", "--hold", script).strip()
    assert hand_submitted(site) == ("pending", job_id)
    site.cluster.run("scontrol", "release", job_id)
    wait_for(lambda: site.record(job_id)["JobState"] == "RUNNING")
    assert hand_submitted(site) == ("running", job_id)  # long before its ranks have met
    assert site.ended(job_id)["JobState"] == "COMPLETED"
    folder = site.home / awkward
    assert read(folder, "summary.json")["outcome"] == "completed"
    assert losses(folder) == pytest.approx(alone(*SMALL), rel=1e-5)
    assert not list(site.home.rglob("pwned"))


@pytest.mark.usefixtures("beside_others")
def test_a_wrong_partition_is_refused_with_slurms_message(site: Site) -> None:
    done = site.run("strategy=data", "nodes=2", *SMALL, "launcher=slurm", "launcher.partition=gpux")
    assert done.returncode == 3
    assert "invalid partition specified: gpux" in done.stderr
    assert "Partitions here: main (4 nodes), urgent (4 nodes)." in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(site.home.glob("runs/*/*"))  # no run ever lived


@pytest.mark.full
def test_a_resume_that_slurm_refuses_leaves_the_run_as_it_was(site: Site, workers: Workers) -> None:
    folder = workers.train("strategy=single", *SMALL).folder
    owner.release(RunFolder(folder))  # this process

    def content() -> dict[Path, bytes]:
        files = (path for path in folder.rglob("*") if path.is_file() and path.parent.name != "slurm")
        return {path: path.read_bytes() for path in files}

    before = content()
    refused = site.run(f"resume={folder}", "training.steps=20", "launcher=slurm", "launcher.partition=gpux")
    assert refused.returncode == 3
    assert "invalid partition specified: gpux" in refused.stderr
    after = content()
    changed = {path.name for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    assert changed == {"attempts.jsonl", "phase"}  # when it was asked for; what the last start did at its end
    assert site.run(f"resume={folder}", "training.steps=20", "launcher=local").returncode == 0
    assert read(folder, "summary.json")["steps"] == 20


@pytest.mark.usefixtures("beside_others")
def test_too_many_nodes_are_refused_with_slurms_message(site: Site) -> None:
    done = site.run("strategy=data", "nodes=8", *SMALL, "launcher=slurm", "name=eight")
    assert done.returncode == 3
    assert "Requested node configuration is not available" in done.stderr  # 22.05: (PartitionConfig)
    assert "main (4 nodes)" in done.stderr
    assert not list(site.home.glob("runs/*/*"))
    assert not site.cluster.run("squeue", "-h", "--states=PD,R", "--name=eight")


def test_hosts_that_are_down_only_delay_a_job(site: Site) -> None:
    """Slurm's doubts are the same as above, but a host comes back: the job must stay in the queue."""
    site.cluster.run("scontrol", "update", "NodeName=n4", "State=DRAIN", "Reason=test")
    try:
        done = site.run("strategy=data", "nodes=4", *SMALL, "launcher=slurm", "name=waits")
        assert done.returncode == 0, done.stderr
        assert site.cluster.run("squeue", "-h", "-o", "%T", "--name=waits").strip() == "PENDING"
    finally:
        site.cluster.run("scontrol", "update", "NodeName=n4", "State=RESUME")
        site.cluster.run("scancel", "--name=waits")


@pytest.mark.usefixtures("beside_others")
def test_a_failing_setup_line_ends_the_job_with_its_text(site: Site) -> None:
    setup = "launcher.setup=['export FINE=1','echo here; ls /no/such/place','touch never']"
    done = site.run("strategy=data", "nodes=2", *SMALL, "launcher=slurm", setup, "launcher.wait=true")
    assert done.returncode == 1
    assert "/no/such/place': No such file or directory" in done.stdout
    assert (
        done.stdout.strip()
        .splitlines()[-1]
        .endswith("setup line failed with exit code 2: echo here; ls /no/such/place")
    )
    folder = only_run(site)
    assert read(folder, "summary.json")["outcome"] == "failed"
    assert read(folder, "failure.json")["kind"] == "start"
    assert not list(site.home.rglob("never"))


def worker_of(folder: Path, rank: int, *, waits: bool = False) -> psutil.Process | None:
    """The worker process of a rank on this machine, by its run folder and Slurm's own variable.

    waits: the one that waits for the next start, and has no log yet.
    """
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            mine = "hpc_parallel.worker.main" in words and str(folder) in words
            mine = mine and waits != any("/logs/rank-" in file.path for file in process.open_files())
            if mine and process.environ().get("SLURM_PROCID") == str(rank):
                return process
        except psutil.Error:
            continue
    return None


@pytest.mark.full
@pytest.mark.timing
def test_a_killed_rank_ends_the_job_and_is_named(site: Site) -> None:
    words = ("strategy=pipeline", "nodes=4", *SMALL, "training.steps=100000", "run_dir=killed", *ONCE)
    following = site.follow(*words)
    folder = site.home / "killed"
    wait_for((folder / "metrics.jsonl").exists)
    worker = worker_of(folder, rank=2)
    assert worker is not None
    killed_at = time.monotonic()
    worker.send_signal(signal.SIGKILL)
    output, _ = following.communicate(timeout=PATIENCE_S)
    assert following.returncode == 1
    assert time.monotonic() - killed_at < 30
    failure = read(folder, "failure.json")
    assert (failure["rank"], failure["host"], failure["signal"]) == (2, "n3", "SIGKILL")
    assert len(failure["followers"]) == 3
    assert output.strip().splitlines()[-1] == "rank 2 on n3 failed first: killed by SIGKILL; 3 followers"
    assert read(folder, "summary.json")["outcome"] == "failed"
    wait_for(lambda: worker_of(folder, rank=0) is None)


@pytest.mark.full
def test_a_rank_killed_with_its_supervisor_is_named(site: Site) -> None:
    """As the kernel's out-of-memory killer may do it: the task itself is gone, srun alone tells."""
    words = ("strategy=data", "nodes=2", *SMALL, "training.steps=100000", "run_dir=task", *ONCE)
    following = site.follow(*words)
    folder = site.home / "task"
    wait_for((folder / "metrics.jsonl").exists)
    worker = worker_of(folder, rank=1)
    assert worker is not None
    worker.parent().send_signal(signal.SIGKILL)
    output, _ = following.communicate(timeout=PATIENCE_S)
    assert following.returncode == 1
    assert output.strip().splitlines()[-1] == "rank 1 on n2 failed first: killed by SIGKILL; 1 follower"
    assert read(folder, "failure.json")["signal"] == "SIGKILL"
    wait_for(lambda: worker_of(folder, rank=1) is None)


@pytest.mark.full
def test_a_cancelled_job_is_reported_as_cancelled(site: Site) -> None:
    words = ("strategy=data", "nodes=2", *SMALL, "training.steps=100000", "run_dir=cancelled")
    following = site.follow(*words)
    folder = site.home / "cancelled"
    wait_for((folder / "metrics.jsonl").exists)
    job_id = site.cluster.run("squeue", "-h", "-o", "%i", "--name=data", "--states=R").strip()
    site.cluster.run("scancel", job_id)
    following.communicate(timeout=PATIENCE_S)
    assert following.returncode == 1
    assert read(folder, "summary.json")["outcome"] == "cancelled"
    assert not (folder / "failure.json").exists()


@pytest.mark.full
def test_a_requeued_job_goes_on_and_doubles_no_step(site: Site) -> None:
    """Slurm's SIGTERM comes first, so all is saved."""
    words = ("strategy=data", "nodes=2", *SMALL, "training.steps=100000", "run_dir=again", "name=again")
    assert site.run(*words, "launcher=slurm").returncode == 0
    folder = site.home / "again"
    wait_for((folder / "metrics.jsonl").exists)
    job_id = site.cluster.run("squeue", "-h", "-o", "%i", "--name=again").strip()
    site.cluster.run("scontrol", "requeue", job_id)
    wait_for(lambda: len(starts(RunFolder(folder))) == 2)
    second = starts(RunFolder(folder))[1]
    assert (second.after_step or 0) > 0
    assert second.lost_steps == 0
    wait_for(lambda: last_step(folder) > (second.after_step or 0))
    site.cluster.run("scancel", job_id)
    site.ended(job_id)
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1))
    wait_for((folder / "summary.json").exists)
    summary = read(folder, "summary.json")
    assert (summary["restarts"], summary["lost_steps"], summary["job_ids"]) == (1, 0, [job_id])
    events = [json.loads(line) for line in (folder / "attempts.jsonl").read_text().splitlines()]
    launched = [datetime.fromisoformat(event["launched"]) for event in events if "launched" in event]
    assert len(launched) == 2
    span_s = (
        datetime.fromisoformat(summary["ended"]) - datetime.fromisoformat(events[0]["submitted"])
    ).total_seconds()
    use = summary["time_use_s"]
    assert sum(use.values()) == pytest.approx(span_s, rel=0.01)
    assert use["restart"] > 0
    assert summary["useful_share"] == pytest.approx(use["steps"] / span_s, rel=0.01)


def last_step(folder: Path) -> int:
    return len(losses(folder))


@pytest.mark.full
def test_a_rank_that_never_arrives_is_named_with_its_host(site: Site) -> None:
    words = ("strategy=data", "nodes=2", *SMALL, "cluster.start_timeout_s=6", "run_dir=absent", *ONCE)
    following = site.follow(*words)
    folder = site.home / "absent"
    worker = wait_for(lambda: worker_of(folder, rank=1))
    worker.suspend()  # it is importing torch: the others will wait for it in vain
    output, _ = following.communicate(timeout=PATIENCE_S)
    assert following.returncode == 1
    assert "1 of 2 ranks arrived within 6 s; missing: rank 1 on n2." in output.splitlines()[-1]
    assert read(folder, "failure.json")["kind"] == "start"
