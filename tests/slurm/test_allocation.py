"""Lines inside an allocation run on its nodes: `salloc`'s variables in the shell, and no job of their own."""

from __future__ import annotations

import getpass
import json
import os
import pty
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from test_jobs import SHELL, SMALL, Site, losses, read, worker_of
from test_operate import SLOW
from test_packed import SHARING, begun

from tests import python_path
from tests.waiting import PATIENCE_S, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1600)]
MANY = ("training.steps=60", "training.precision=float64")
LONG = ("strategy=pipeline", "nodes=2", *SMALL, "training.steps=100000", *SLOW, "model.pause_s=0.1")
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
            env=self.site.environment | SHELL | self.variables | {"PYTHONPATH": python_path()},
            stdout=subprocess.PIPE,
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


# Notes its step, host, GPU and port, and then runs until it is asked to stop or may end.
PACKED = """
import os, sys, time
from pathlib import Path
from hpc_parallel import job_context
number, home = sys.argv[1], Path(sys.argv[2])
step = f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
words = (os.environ[name] for name in ("SLURMD_NODENAME", "CUDA_VISIBLE_DEVICES", "MASTER_PORT"))
with (home / "begun").open("a") as file:
    print(number, step, *words, file=file)
for at in range(10**6):
    if job_context.stop_requested(at) or (home / f"go{number}").exists():
        break
    time.sleep(0.1)
sys.exit(7 if number == "1" else 0)
"""


@pytest.mark.full
def test_a_packed_sweep_in_an_allocation_runs_beside_each_other(site: Site) -> None:
    """Four places for seven runs: one fails, one is cancelled, two get their places, one never begins."""
    (site.home / "own.py").write_text(PACKED)

    def begun() -> dict[str, list[str]]:
        file = site.home / "begun"
        lines = file.read_text().splitlines() if file.exists() else []
        return {words[0]: words[1:] for words in map(str.split, lines)}

    with allocation(site, "--gpus-per-node=2", "--cpus-per-task=2") as here:
        words = ("-m", "seed=range(1,8)", "gpus_per_node=1", "sweep.pack=auto", "launcher.snapshot=false")
        sweep = here.start(*words, "--", "own.py", "{seed}", str(site.home))
        wait_for(lambda: len(begun()) == 4, within_s=PATIENCE_S)
        first = begun()
        records = [
            site.cluster.run("scontrol", "--oneliner", "show", "step", line[0]) for line in first.values()
        ]
        facts = [dict(word.split("=", 1) for word in record.split() if "=" in word) for record in records]
        assert [(fact["State"], fact["Nodes"], fact["CPUs"]) for fact in facts] == [("RUNNING", "1", "1")] * 4
        # Slurm's own records of the steps that run at the same time: two on each host, with a GPU each.
        hosts = [fact["NodeList"] for fact in facts]
        assert [hosts.count(host) for host in hosts] == [2] * 4
        assert len({(host, gpu) for _, host, gpu, _ in first.values()}) == 4
        assert len({line[3] for line in first.values()}) == 4
        assert len(steps(here)) == 4
        by_seed = {
            str(OmegaConf.load(file)["seed"]): file.parent for file in site.home.glob("runs/*/*/config.yaml")
        }
        assert set(first) == {"1", "2", "3", "4"}
        (site.home / "go1").touch()
        wait_for(lambda: len(begun()) == 5)
        assert begun()["5"][1:3] == first["1"][1:3]  # it has the place of the failed run
        assert site.command("cancel", str(by_seed["2"]), "--yes").returncode == 0
        wait_for(lambda: len(begun()) == 6)
        assert begun()["6"][1:3] == first["2"][1:3]
        states = json.loads(site.command("status", "--json", *(str(by_seed[seed]) for seed in "67")).stdout)
        assert [state["state"] for state in states] == ["running", "pending"]
        sweep.send_signal(signal.SIGINT)
        output, _ = sweep.communicate(timeout=PATIENCE_S)
        assert sweep.returncode == 1, output
        outcomes = {seed: read(by_seed[seed], "summary.json")["outcome"] for seed in "123456"}
        assert outcomes == {"1": "failed"} | dict.fromkeys("23456", "cancelled"), output
        assert not by_seed["7"].exists()
        assert "5 cancelled, 1 failed, 1 not started" in output
        assert here.state() == "RUNNING"
        wait_for(lambda: steps(here) == [])


@pytest.mark.full
def test_runs_share_the_gpus_of_an_allocation(site: Site) -> None:
    """Eight at once, two on each of two GPUs of two hosts."""
    (site.home / "own.py").write_text(SHARING)
    with allocation(site, "--gpus-per-node=2", "--cpus-per-task=4") as here:
        words = ("-m", "seed=range(1,9)", "gpus_per_node=1", "sweep.pack=auto", "launcher.snapshot=false",
                 "sweep.runs_per_gpu=2", "plan.on_overflow=off")  # fmt: skip
        ended = here.line(*words, "--", "own.py", str(site.home))
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert sorted(words[1] for words in begun(site)) == [*"00001111"]
        assert len({words[0] for words in begun(site)}) == 8  # a step for each
        assert here.state() == "RUNNING"


@pytest.mark.full
def test_at_the_end_of_an_allocation_a_sweep_saves_and_says_what_is_left(site: Site) -> None:
    with allocation(site, "--time=1") as here:
        small = [word for word in SMALL if not word.startswith("training.steps")]
        long = ("-m", "strategy=data", "nodes=2", *small, "training.steps=100000", "seed=1,2")
        done = here.line(*long, "training.checkpoint_every=10", "sweep.pack=auto")
        assert done.returncode == 1, done.stdout + done.stderr
        (run,) = (path.parent for path in site.home.glob("runs/*/*/summary.json"))
        assert "the time limit of the allocation was near: saved at step" in read(run, "stopped.json")["line"]
        assert "(the allocation you are in) ends soon, so no other run starts in it" in done.stdout
        assert "1 failed, 1 not started" in done.stdout
    with allocation(site) as here:
        (folder,) = (path.parent for path in site.home.glob("runs/sweeps/*/sweep.json"))
        words = shlex.split(done.stdout.splitlines()[-1])  # the line to type
        assert str(folder.relative_to(site.home)) in words[-1]
        more = here.line(*words[3:], "dry_run=true")
        assert "2 runs of 4 devices together" in more.stdout, more.stdout + more.stderr


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
