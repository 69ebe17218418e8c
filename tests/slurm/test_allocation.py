"""Lines inside an allocation run on its nodes: `salloc`'s variables in the shell, and no job of their own."""

from __future__ import annotations

import getpass
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from test_jobs import SHELL, SMALL, Site, losses, read, worker_of

from tests.waiting import PATIENCE_S, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1600)]
MANY = ("training.steps=60", "training.precision=float64")
LONG = ("strategy=pipeline", "nodes=2", *SMALL, "training.steps=100000")
SCRIPT = """
import time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("ranks", int(total), flush=True)
time.sleep(600)
"""


class Allocation:
    """A shell in an allocation of two hosts, with variables that srun would take as requests."""

    def __init__(self, site: Site, job: str) -> None:
        self.site, self.job = site, job
        self.variables = {"SLURM_JOB_ID": job, "SLURM_NNODES": "2", "SLURM_JOB_NUM_NODES": "2"}

    def line(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.site.run(*words, timeout_s=900, **self.variables, **variables)

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "hpc_parallel.run", *words], cwd=self.site.home, text=True,
            env=self.site.environment | SHELL | self.variables, stdout=subprocess.PIPE,
        )  # fmt: skip

    def folder(self, name: str) -> Path:
        return self.site.home / name

    def outcome(self, name: str) -> object:
        wait_for((self.folder(name) / "summary.json").exists)
        return read(self.folder(name), "summary.json")["outcome"]

    def state(self) -> str:
        return self.site.record(self.job)["JobState"]

    def hosts(self, name: str) -> list[str]:
        return [rank["host"] for rank in read(self.folder(name), "environment.json")["ranks"]]


@contextmanager
def allocation(site: Site, *flags: str) -> Iterator[Allocation]:
    name = site.home.name
    site.cluster.run("salloc", "--quiet", "--no-shell", "--nodes=2", f"--job-name={name}", *flags)
    job = site.cluster.run("squeue", "-h", "-o", "%i", f"--name={name}").strip()
    try:
        yield Allocation(site, job)
    finally:
        site.cluster.run("scancel", job)


@pytest.mark.usefixtures("beside_others")
def test_lines_in_an_allocation_run_on_its_nodes(site: Site, alone: Callable[..., list[float]]) -> None:
    with allocation(site) as here:
        long = here.start(*LONG, "run_dir=long")
        script = here.start("nodes=2", "run_dir=script", "launcher.snapshot=false", "--", own_script(site))
        wait_for((here.folder("long") / "metrics.jsonl").exists, within_s=PATIENCE_S)
        # A second line at once, on the one CPU that each host of the allocation has.
        done = here.line("strategy=pipeline", "nodes=2", *SMALL, "run_dir=second")
        assert done.returncode == 0, done.stdout + done.stderr
        choice = f"launcher allocation: runs in job {here.job} (the allocation you are in) on "
        assert choice in done.stdout
        assert f"warning     job {here.job} (the allocation you are in) has no GPU" in done.stdout
        assert losses(here.folder("second")) == pytest.approx(alone(*SMALL), rel=1e-5)
        assert len(set(here.hosts("second"))) == 2
        jobs = site.cluster.run("squeue", "-h", "-o", "%i %j", f"--user={getpass.getuser()}")
        assert f"{here.job} {site.home.name}" in jobs
        assert [read(here.folder("second"), "summary.json")["job_ids"], "pipeline" in jobs.split()] == [
            [here.job],
            False,
        ]

        refused = here.line("strategy=pipeline", "nodes=4", *SMALL)
        assert refused.returncode == 2
        assert f"nodes = 4 is more than the 2 nodes of job {here.job}" in refused.stderr
        assert "launcher=local simulates 4 nodes" in refused.stderr
        assert "Try nodes=2." in refused.stderr

        long.send_signal(signal.SIGINT)
        output, _ = long.communicate(timeout=PATIENCE_S)
        assert long.returncode == 1
        assert "cancelled by Ctrl-C: saved at step" in output.splitlines()[-1]
        assert here.outcome("long") == "cancelled"

        wait_for(lambda: "ranks 2" in (here.folder("script") / "logs/rank-1.out").read_text())
        assert site.command("cancel", "script", "--yes").returncode == 0
        script.communicate(timeout=PATIENCE_S)
        assert here.outcome("script") == "cancelled"
        assert len(set(here.hosts("script"))) == 2
        wait_for(lambda: steps(here) == [])
        assert here.state() == "RUNNING"


def own_script(site: Site) -> str:
    (site.home / "own.py").write_text(SCRIPT)
    return "own.py"


def steps(here: Allocation) -> list[str]:
    """The steps that run in the allocation. Slurm adds one of its own, `extern`, on some sites."""
    return here.site.cluster.run("squeue", "-h", "-s", "-o", "%i", "-j", here.job).split()


@pytest.mark.full
def test_cancel_on_another_host_ends_the_step_and_not_the_allocation(site: Site) -> None:
    with allocation(site) as here:
        long = here.start(*LONG, "run_dir=long")
        wait_for((here.folder("long") / "metrics.jsonl").exists, within_s=PATIENCE_S)
        there = ("srun", f"--jobid={here.job}", "--overlap", "--mem=0", "-N1", "-n1", f"-D{site.home}")
        command = (sys.executable, "-m", "hpc_parallel")
        assert "running" in site.cluster.run(*there, *command, "status", "long", "--json")
        site.cluster.run(*there, *command, "cancel", "long", "--yes")
        output, _ = long.communicate(timeout=PATIENCE_S)
        assert "cancelled by SIGTERM: saved at step" in output.splitlines()[-1]
        assert here.state() == "RUNNING"


@pytest.mark.full
def test_ranks_start_again_in_an_allocation(site: Site, alone: Callable[..., list[float]]) -> None:
    """After a kill they go on where they were, and the allocation and its other steps stay."""
    with allocation(site) as here:
        words = ("strategy=data", "nodes=2", *SMALL, *MANY, "run_dir=run")
        long = here.start(*words, "training.checkpoint_every=10", "launcher.max_restarts=1")
        wait_for(lambda: any(here.folder("run").glob("checkpoints/step-*")), within_s=PATIENCE_S)
        worker = worker_of(here.folder("run"), rank=1)
        assert worker is not None
        worker.send_signal(signal.SIGKILL)
        output, _ = long.communicate(timeout=PATIENCE_S)
        assert long.returncode == 0, output
        log = (here.folder("run") / "slurm" / f"{here.job}.out").read_text()
        assert "the ranks start again in the same job, on the same hosts, 1 of 1\n" in log
        summary = read(here.folder("run"), "summary.json")
        assert (summary["outcome"], summary["restarts"], summary["job_ids"]) == ("completed", 1, [here.job])
        assert losses(here.folder("run")) == pytest.approx(alone(*SMALL, *MANY), rel=1e-10)
        assert (here.state(), here.site.record(here.job)["Restarts"]) == ("RUNNING", "0")
        wait_for(lambda: steps(here) == [])


@pytest.mark.full
def test_a_second_ctrl_c_ends_at_once_and_leaves_no_step(site: Site) -> None:
    with allocation(site) as here:
        long = here.start(*LONG, "run_dir=long")
        wait_for((here.folder("long") / "metrics.jsonl").exists, within_s=PATIENCE_S)
        ranks = steps(here)
        site.cluster.run("scancel", "--signal=STOP", *ranks)  # no rank can save
        long.send_signal(signal.SIGINT)
        wait_for(lambda: "stopping" in ((long.stdout and long.stdout.readline()) or ""))
        long.send_signal(signal.SIGINT)
        long.communicate(timeout=PATIENCE_S)
        assert here.outcome("long") == "cancelled"
        wait_for(lambda: steps(here) == [])


@pytest.mark.full
def test_a_killed_command_and_an_ended_allocation_save(site: Site) -> None:
    with allocation(site) as here:
        killed, ended = here.start(*LONG, "run_dir=killed"), here.start(*LONG, "run_dir=ended")
        for name in ("killed", "ended"):
            wait_for((here.folder(name) / "metrics.jsonl").exists, within_s=PATIENCE_S)
        killed.kill()
        assert here.outcome("killed") == "cancelled"
        assert "saved at step" in str(read(here.folder("killed"), "stopped.json")["line"])
        site.cluster.run("scancel", here.job)
        output, _ = ended.communicate(timeout=PATIENCE_S)
        assert "saved at step" in output.splitlines()[-1]
        assert "resume=" in output.splitlines()[-1]
        stale = here.line("strategy=single", "dry_run=true")
        assert "#SBATCH --nodes=1" in stale.stdout  # as without an allocation


@pytest.mark.full
@pytest.mark.parametrize("start", ["torchrun", "mpirun"])
def test_other_starts_in_an_allocation(site: Site, alone: Callable[..., list[float]], start: str) -> None:
    mpirun = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    with allocation(site, "--gpus-per-node=2", "--cpus-per-task=2") as here:
        line = (
            "strategy=data",
            "nodes=2",
            "gpus_per_node=2",
            *SMALL,
            f"cluster.start={start}",
            "run_dir=run",
        )
        done = here.line(*line, **mpirun)
        assert done.returncode == 0, done.stdout + done.stderr
        assert losses(here.folder("run")) == pytest.approx(alone(*SMALL), rel=1e-5)
        assert sorted(here.hosts("run")) == sorted(2 * sorted(set(here.hosts("run"))))
        assert "gpus_per_node = 3 is more than the 2 GPUs" in here.line("gpus_per_node=3").stderr


@pytest.mark.full
def test_a_sweep_and_a_notebook_in_an_allocation(site: Site) -> None:
    with allocation(site) as here:
        rates = "optimizer.learning_rate=0.001,0.002"
        done = here.line("-m", "strategy=data", "nodes=2", *SMALL, rates)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "2 completed" in done.stdout
        folders = sorted(path.parent for path in site.home.glob("runs/*/*/summary.json"))
        assert [read(folder, "summary.json")["job_ids"] for folder in folders] == [[here.job], [here.job]]
        words = ["strategy=data", "nodes=2", *SMALL, "run_dir=notebook"]
        code = f"import hpc_parallel as hp; print(hp.submit(hp.compose({words})).wait()['world_size'])"
        environment = site.environment | SHELL | here.variables
        notebook = [sys.executable, "-c", code]
        assert subprocess.check_output(notebook, cwd=site.home, env=environment, text=True) == "2\n"
        assert len(set(here.hosts("notebook"))) == 2


@pytest.mark.full
def test_the_line_of_the_guide_inside_srun_pty(site: Site, alone: Callable[..., list[float]]) -> None:
    """The shell is a step of its own on the first host, with a terminal."""
    with allocation(site) as here:
        leader, terminal = pty.openpty()
        line = ("-m", "hpc_parallel.run", "strategy=pipeline", "nodes=2", *SMALL, "run_dir=run")
        step = subprocess.Popen(
            ["srun", f"--jobid={here.job}", "--nodes=1", "--ntasks=1", "--pty", sys.executable, *line],
            cwd=site.home, env=site.environment, stdin=terminal, stdout=terminal, stderr=terminal,
            start_new_session=True,
        )  # fmt: skip
        os.close(terminal)
        output = printed_on(leader)
        assert step.wait(PATIENCE_S) == 0, output
        assert f"runs in job {here.job} (the allocation you are in)" in output
        assert losses(here.folder("run")) == pytest.approx(alone(*SMALL), rel=1e-5)
        assert len(set(here.hosts("run"))) == 2
        wait_for(lambda: steps(here) == [])
        assert here.state() == "RUNNING"


def printed_on(leader: int) -> str:
    """Everything that is printed on a terminal, until nobody has it open."""
    output = b""
    with suppress(OSError), os.fdopen(leader, "rb", buffering=0) as terminal:
        while part := terminal.read(4096):
            output += part
    return output.decode()
