"""A script of the user's own that Slurm ends, by its time limit and for an urgent job, and that goes on."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest
from test_jobs import Site, is_over, read
from test_starts import words_of

from tests.waiting import wait_for

pytestmark = [pytest.mark.full, pytest.mark.slurm, pytest.mark.timeout(1200)]
STEPS, HELD = 16, 6
SCRIPT = """
import argparse, os, signal, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("saved")
parser.add_argument("--steps", type=int)
parser.add_argument("--hold-at", type=int)  # until a signal asks to stop
parser.add_argument("--resume")
args = parser.parse_args()
signals = []
for number in (signal.SIGUSR1, signal.SIGTERM):  # Slurm itself sends the second one at a preemption
    signal.signal(number, lambda number, frame: signals.append(number))
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
inputs = torch.randn(args.steps, 4, 8)
first = 0
if args.resume:
    state = torch.load(args.resume)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["step"]
for step in range(first, args.steps):
    loss = model(inputs[step, 2 * rank : 2 * rank + 2]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean = loss.detach() / 2
    dist.all_reduce(mean)
    if rank == 0:
        print(f"step {step + 1} loss {mean.item()!r}", flush=True)
    while step + 1 == args.hold_at and not args.resume and not signals:
        time.sleep(0.1)
    stops = torch.tensor(len(signals))
    dist.all_reduce(stops)
    if stops:
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, args.saved)
        dist.barrier()
        break
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # threads of gloo may abort an ordinary exit (docs/own-script.md)
"""


@pytest.fixture
def home(site: Site) -> Path:
    (site.home / "loop.py").write_text(SCRIPT)
    return site.home


def test_the_time_limit_of_slurm(site: Site, home: Path) -> None:
    words = ("launcher.time_minutes=1", "launcher.grace_s=20")
    job_id = started(site, *words)
    assert_equals_the_undisturbed_run(site, job_id)


def test_an_urgent_job_takes_the_hosts(site: Site, home: Path) -> None:
    job_id = started(site)
    out = home / "run" / "logs" / "rank-0.out"
    wait_for(lambda: out.exists() and f"step {HELD} " in out.read_text())
    words = ("--partition=urgent", "--nodes=4", "--exclusive", "--wrap=sleep 600")
    urgent = site.cluster.run("sbatch", "--parsable", "--output=/dev/null", *words)
    wait_for(lambda: site.record(urgent)["JobState"] == "RUNNING", within_s=300)
    assert site.record(job_id)["JobState"] == "PENDING"
    site.cluster.run("scancel", urgent)
    assert_equals_the_undisturbed_run(site, job_id)
    assert (home / "run" / "last.pt").exists()


SLOW_PYTHON = """#!/bin/bash
case "$*" in *"hpc_parallel.job rank"* | *submitit.core*)
    touch {begun}
    while [ ! -e {warned} ]; do sleep 0.1; done ;;
esac
exec {python} "$@"
"""


@pytest.mark.parametrize("start", ["srun", "mpirun"])
def test_a_warning_before_python_has_begun_is_no_failure(start: str, site: Site) -> None:
    """A job of one minute is warned at any time from its start on."""
    begun, warned, python = (site.home / name for name in ("begun", "warned", "slow_python"))
    python.write_text(SLOW_PYTHON.format(begun=begun, warned=warned, python=sys.executable))
    python.chmod(0o755)
    (site.home / "short.py").write_text("print('done')\n")
    words = words_of("openmpi", site) if start == "mpirun" else []
    done = site.run("launcher=slurm", "run_dir=run", f"launcher.python={python}", *words, "--", "short.py")
    assert done.returncode == 0, done.stdout + done.stderr
    job_id = str(read(site.home / "run", "owner.json")["job_id"])
    wait_for(begun.exists)
    receiver = ["--batch"] if start == "mpirun" else []
    site.cluster.run("scancel", "--signal=USR2", *receiver, job_id)
    time.sleep(2)  # Slurm does not say when all processes have the signal
    warned.touch()
    record = site.ended(job_id)
    assert (record["JobState"], record["Restarts"]) == ("COMPLETED", "0")
    assert read(site.home / "run", "summary.json")["outcome"] == "completed"


def started(site: Site, *words: str) -> str:
    """The job of a script that holds at a step until Slurm asks it to stop."""
    keys = ("nodes=2", "launcher=slurm", "run_dir=run", "script.stop_signal=SIGUSR1", *words)
    resume = "script.resume_arguments=--resume {run}/last.pt"
    done = site.run(*keys, resume, "--", "loop.py", "{run}/last.pt", f"--steps={STEPS}", f"--hold-at={HELD}")
    assert done.returncode == 0, done.stdout + done.stderr
    return str(read(site.home / "run", "owner.json")["job_id"])


def assert_equals_the_undisturbed_run(site: Site, job_id: str) -> None:
    """It was requeued under its number, and each step of each start has the loss of a run without a stop."""
    wait_for(lambda: is_over(site.home / "run"), within_s=600)
    site.ended(job_id)
    summary = read(site.home / "run", "summary.json")
    assert (summary["outcome"], summary["job_ids"]) == ("completed", [job_id])
    log = "".join(path.read_text() for path in (site.home / "run" / "slurm").glob("*.out"))
    ended = log.count("nothing is left to do in this start")  # once more, by Slurm 24.05 and newer
    assert summary["restarts"] + ended == int(site.record(job_id)["Restarts"]) > ended
    words = ("nodes=2", "launcher=slurm", "launcher.wait=true", "run_dir=whole", "--", "loop.py")
    done = site.run(*words, "{run}/last.pt", f"--steps={STEPS}")
    assert done.returncode == 0, done.stdout + done.stderr
    whole = curve(site.home / "whole")
    assert [step for step, _ in whole] == list(range(1, STEPS + 1))
    disturbed = curve(site.home / "run")
    assert dict(disturbed) == dict(whole)
    assert set(disturbed) == set(whole)  # also steps that a start has repeated
    assert [step for step, _ in disturbed].count(HELD + 1) == 1  # it went on from its file


def curve(folder: Path) -> list[tuple[int, float]]:
    found = re.findall(r"step (\d+) loss (\S+)", (folder / "logs" / "rank-0.out").read_text())
    return [(int(step), float(loss)) for step, loss in found]
