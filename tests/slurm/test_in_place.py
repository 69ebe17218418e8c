"""A start that fails is followed by another one in the same job, on the same hosts."""

from __future__ import annotations

import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
from test_jobs import SMALL, Site, losses, read, worker_of

from hpc_parallel.record import attempts
from hpc_parallel.record.host_memory import ROOT
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.slurm.short_forms import expand_hosts
from tests.scripts.loops import printed_losses
from tests.waiting import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]
COPIED = ("training.memory_checkpoint_every=2",)
AGAIN = "the ranks start again in the same job, on the same hosts, {} of 3"
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
rank, saved = os.environ["RANK"], Path(sys.argv[1])
new = saved.with_name("new")
print("port", os.environ["MASTER_PORT"], "words", *sys.argv[2:], flush=True)
if sys.argv[2] == "raise":
    raise ValueError("no data")
first = int(saved.read_text()) if "--resume" in sys.argv else 0
for step in range(first + 1, 7):
    if rank == "0":
        print("step", step, flush=True)
        new.write_text(str(step))
        new.replace(saved)  # other ranks may read it now
    if step == 4 and first == 0 and rank == "1":
        while not saved.exists() or saved.read_text() != "6":
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
if first == 0:
    time.sleep(600)
"""


def submit(site: Site, harm: str, *words: str, script: str = SCRIPT) -> tuple[str, RunFolder]:
    """The job of a script after its end, which torch takes no part in."""
    (site.home / "loop.py").write_text(script)
    keys = ("nodes=2", "launcher=slurm", "launcher.wait=true", "run_dir=run")
    resume = "script.resume_arguments=--resume {run}/saved"
    site.run(
        *keys, *words, resume, "script.metrics='step (?P<step>\\d+)'", "--", "loop.py", "{run}/saved", harm
    )
    job = str(read(site.home / "run", "owner.json")["job_id"])
    site.ended(job)
    return job, RunFolder(site.home / "run")


UNFIT = """
import os, signal, sys, time
from pathlib import Path
rank, host, saved = os.environ["RANK"], os.environ["SLURMD_NODENAME"], Path(sys.argv[1])
bad, died, new = map(saved.with_name, ("bad", "died", "new"))
step = int(saved.read_text()) if saved.exists() else 0
if rank == "0":
    print("step", step + 1, flush=True)
    new.write_text(str(step + 1))
    new.replace(saved)  # other ranks may read it now
elif not bad.exists() or bad.read_text() == host:
    bad.write_text(host)
    times = int(died.read_text()) + 1 if died.exists() else 1
    while not saved.exists() or saved.read_text() != str(times):
        time.sleep(0.05)
    died.write_text(str(times))
    os.kill(os.getpid(), signal.SIGKILL)
if rank == "0" and step < 2:
    time.sleep(600)
"""


@pytest.mark.usefixtures("beside_others")
def test_a_spare_takes_the_place_of_a_host_that_failed_twice(site: Site) -> None:
    job, folder = submit(site, "die", "launcher.spares=1", script=UNFIT)
    record, summary = site.record(job), read(folder.path, "summary.json")
    assert (record["JobState"], record["Restarts"], record["NumNodes"]) == ("COMPLETED", "0", "3")
    assert (summary["outcome"], summary["restarts"], summary["spares"]) == ("completed", 2, 1)
    bad = (folder.path / "bad").read_text()
    first, unfit, spare = expand_hosts(record["NodeList"])
    assert [(end.how, end.host) for end in attempts.ends(folder)] == [("killed", bad)] * 2
    assert unfit == bad
    again = f"the ranks start again in the same job, on the spare {spare} in place of {bad}, 2 of 3"
    starts = [line for line in log_of(folder, job) if "start again" in line or line.startswith("hpc_para")]
    assert [line.partition(" on ")[2] for line in starts[1:]] == [
        "the same hosts, 1 of 3", f"{first},{bad}", again.partition(" on ")[2], f"{first},{spare}",
    ]  # fmt: skip


def log_of(folder: RunFolder, job: str) -> list[str]:
    lines = [log.read_text().splitlines() for log in sorted(folder.slurm.glob(f"{job}*.out"))]
    return [line for of_rank in lines for line in of_rank]


@pytest.mark.usefixtures("beside_others")
def test_a_script_goes_on_in_its_job(site: Site) -> None:
    job, folder = submit(site, "die")
    record, summary = site.record(job), read(folder.path, "summary.json")
    assert (record["JobState"], record["Restarts"]) == ("COMPLETED", "0")
    assert (summary["outcome"], summary["restarts"], summary["job_ids"]) == ("completed", 1, [job])
    (end,) = attempts.ends(folder)
    assert (end.how, end.rank, end.step) == ("killed", 1, 6)
    assert end.line == f"rank 1 on {end.host} failed first: killed by SIGKILL; 1 follower"
    said = log_of(folder, job)
    assert [line for line in said if line in (end.line, AGAIN.format(1))] == [end.line, AGAIN.format(1)]
    printed = folder.log(0, "out").read_text()
    ports = re.findall(r"port (\d+) words die(.*)", printed)
    assert [words.split()[:1] for _, words in ports] == [[], ["--resume"]]
    assert ports[0][0] != ports[1][0]  # a rank of the first start could not reach the second one
    assert not folder.failure.exists()


@pytest.mark.usefixtures("beside_others")
def test_a_script_that_raises_ends_after_its_first_failure(site: Site) -> None:
    job, folder = submit(site, "raise")
    record, summary = site.record(job), read(folder.path, "summary.json")
    assert (record["JobState"], record["Restarts"]) == ("FAILED", "0")
    assert (summary["outcome"], summary["restarts"]) == ("failed", 0)
    assert [end.how for end in attempts.ends(folder)] == ["error"]
    assert not [line for line in log_of(folder, job) if "again" in line]


@pytest.mark.full
@pytest.mark.parametrize("start", ["ranks", "torchrun"])
def test_a_script_with_torch_prints_the_losses_of_an_undisturbed_run(start: str, site: Site) -> None:
    words = ("nodes=2", "launcher=slurm", "launcher.wait=true", f"script.start={start}")
    script = ("--", "nano.py", "--out_dir={run}/out", "--max_iters=10")
    whole = site.run(*words, "run_dir=whole", *script)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    resume = "script.resume_arguments=--init_from=resume"
    killed = site.run(*words, "run_dir=killed", resume, *script, "--die_at=6")
    assert killed.returncode == 0, killed.stdout + killed.stderr
    folder = RunFolder(site.home / "killed")
    assert [end.how for end in attempts.ends(folder)] == ["killed"]
    (job,) = read(folder.path, "summary.json")["job_ids"]
    assert site.record(job)["Restarts"] == "0"
    assert printed_losses(folder.path)[-5:] == printed_losses(site.home / "whole")[-5:]


@pytest.mark.full
def test_ranks_that_waited_go_on_as_one_device(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # the tests' own model
    exact = (*SMALL, "training.steps=60", "training.precision=float64", "training.validate_every=null")
    slow = ("model._target_=tests.models.Slow", "+model.pause_s=0.3", "strategy.verify=never")
    whole = site.run("strategy=single", *exact, "launcher=local", "run_dir=whole")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    words = ("strategy=data", "nodes=2", *exact, *slow, "training.checkpoint_every=5")
    per_cpu = "+launcher.extra.mem-per-cpu=1500M"  # Slurm counts it also for steps that overlap
    done = site.run(*words, "launcher=slurm", "launcher.standby=true", per_cpu, "run_dir=run")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = RunFolder(site.home / "run")
    wait_for(folder.metrics.exists)
    waiting = wait_for(lambda: worker_of(folder.path, rank=1, waits=True))
    wait_for(lambda: any(folder.checkpoints.glob("step-*")))
    killed = worker_of(folder.path, rank=1)
    assert killed is not None
    killed.kill()
    wait_for(lambda: worker_of(folder.path, rank=1) == waiting)
    job = str(read(folder.path, "owner.json")["job_id"])
    assert site.ended(job)["JobState"] == "COMPLETED"
    assert losses(folder.path) == pytest.approx(losses(site.home / "whole"), rel=1e-10)
    said = log_of(folder, job)
    last = max(index for index, line in enumerate(said) if line.startswith("hpc_parallel attempt"))
    assert [line for line in said[last:] if "error" in line] == []  # those for the next start end in peace


@pytest.mark.full
@pytest.mark.parametrize("lost", [None, "n2"])
def test_a_training_goes_on_from_the_memory_of_its_hosts(site: Site, lost: str | None) -> None:
    """A rank is killed; the memory of its host may be lost too. The curve is that of one device."""
    exact = (*SMALL, "training.steps=200", "training.precision=float64", "training.validate_every=null")
    whole = site.run("strategy=single", *exact, "launcher=slurm", "launcher.wait=true", "run_dir=whole")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    folder, job = killed(site, *exact, *COPIED)
    if lost is not None:
        (memory,) = memory_of(job)
        shutil.rmtree(memory / lost)
    assert site.ended(job)["JobState"] == "COMPLETED"
    first, second = attempts.starts(folder)
    assert (first.after_step, second.job_id) == (0, job)
    assert second.after_step
    assert second.after_step % 2 == 0
    assert second.lost_steps <= 3  # the next copy may have begun
    line = f"continuing from the copy in memory of step {second.after_step}"
    assert line in folder.log(0, "out").read_text()
    assert losses(folder.path) == pytest.approx(losses(site.home / "whole"), rel=1e-10)
    assert memory_of(job) == []


@pytest.mark.full
def test_a_job_that_fails_leaves_nothing_in_memory(site: Site) -> None:
    folder, job = killed(site, *COPIED, "launcher.max_restarts=0")
    assert site.ended(job)["JobState"] == "FAILED"
    assert [end.how for end in attempts.ends(folder)] == ["killed"]
    assert memory_of(job) == []


ON_EACH = """
export SLURM_JOB_NODELIST=n1,n2 SLURM_NODELIST=n1,n2 SLURM_JOB_NUM_NODES=2 SLURM_NNODES=2 SLURM_NTASKS=2
export SLURM_NPROCS=2 SLURM_TASKS_PER_NODE='1(x2)'
exec {python} -c '
import os
from hpc_parallel.slurm.jobs import run_on_hosts
run_on_hosts("sh", "-c", "touch {home}/freed-$SLURMD_NODENAME", environment=os.environ)'
"""


@pytest.mark.full
def test_the_memory_of_a_host_that_is_left_out_is_freed_too(site: Site) -> None:
    """The start before the last one used it. In these tests all hosts share one memory."""
    script = ON_EACH.format(python=sys.executable, home=site.home)
    words = ("--parsable", "--nodes=3", "--no-kill", "--output=/dev/null", f"--wrap={script}")
    job = site.cluster.run("sbatch", *words)
    assert site.ended(job)["JobState"] == "COMPLETED"
    assert sorted(path.name for path in site.home.glob("freed-*")) == ["freed-n1", "freed-n2", "freed-n3"]


def memory_of(job: str) -> list[Path]:
    """The folders of a job in the memory of this machine, which all hosts share."""
    return list(ROOT.glob(f"hpc_parallel-*-{job}-*"))


def killed(site: Site, *words: str) -> tuple[RunFolder, str]:
    """A training of which rank 1 has been killed after some steps."""
    line = ("strategy=data", "nodes=2", *SMALL, "training.steps=100000", "training.checkpoint_every=1000")
    done = site.run(*line, "launcher=slurm", "run_dir=run", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = RunFolder(site.home / "run")
    wait_for(lambda: folder.metrics.exists() and len(folder.metrics.read_text().splitlines()) > 8)
    worker = worker_of(folder.path, rank=1)
    assert worker is not None
    worker.send_signal(signal.SIGKILL)
    return folder, str(read(folder.path, "owner.json")["job_id"])
