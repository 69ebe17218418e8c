"""A script of the user's own on a real Slurm: the clients of tests/scripts over two hosts."""

from __future__ import annotations

import json
import re

import pytest
from test_jobs import Site, only_run, read
from test_starts import words_of

from tests.marks import in_full
from tests.scripts.loops import losses_alone, printed_losses
from tests.waiting import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


@pytest.mark.usefixtures("beside_others")
@pytest.mark.parametrize("start", ["ranks", pytest.param("torchrun", marks=pytest.mark.full)])
def test_a_failing_rank_is_named_with_its_host_and_line(start: str, site: Site) -> None:
    words = ("nodes=2", "launcher=slurm", "launcher.wait=true", f"script.start={start}")
    done = site.run(*words, "--", "ddp.py", "--fail-at", "3")
    assert done.returncode == 1
    last = done.stdout.splitlines()[-1]
    assert re.match(r"rank 1 on \S+ failed first: ValueError: no data for step 3 \(ddp\.py:\d+\)", last), last
    assert read(only_run(site), "summary.json")["outcome"] == "failed"


@pytest.mark.full
def test_a_sweep_is_an_array_in_which_each_run_has_its_own_arguments(site: Site) -> None:
    words = ("-m", "nodes=2", "launcher=slurm", "sweep.wait=true", "script.arguments.seed=1,2")
    done = site.run(*words, "script.working_directory={run}", "--", "ddp.py", "--steps", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    curves = [json.loads(path.read_text()) for path in site.home.glob("runs/ddp/*/losses.json")]
    expected = [losses_alone("ddp.py", "--steps", "3", "--seed", seed) for seed in ("1", "2")]
    assert sorted(curves) == [pytest.approx(curve, rel=1e-5) for curve in sorted(expected)]


@pytest.mark.full
def test_a_single_file_with_its_own_checkpoint_runs_and_a_killed_rank_is_named(site: Site) -> None:
    words = ("nodes=2", "launcher=slurm", "launcher.wait=true", "launcher.max_restarts=0")
    done = site.run(*words, "run_dir=whole", "--", "nano.py", "--out_dir={run}/out", "--max_iters=10")
    assert done.returncode == 0, done.stdout + done.stderr
    whole = printed_losses(site.home / "whole")
    assert whole == pytest.approx(losses_alone("nano.py", "--max_iters=10"), rel=1e-4)
    killed = site.run(
        *words, "run_dir=killed", "--", "nano.py", "--out_dir={run}/out", "--max_iters=10", "--die_at=6"
    )
    assert killed.returncode == 1
    assert re.search(r"rank 1 on \S+ failed first: killed by SIGKILL", killed.stdout + killed.stderr)
    out = f"--out_dir={site.home / 'killed' / 'out'}"
    resumed = site.run(
        *words, "run_dir=resumed", "--", "nano.py", out, "--max_iters=10", "--init_from=resume"
    )
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert printed_losses(site.home / "resumed") == whole[5:]


OWN_TORCHRUN = (
    "-m", "torch.distributed.run", "--nnodes={nodes}", "--nproc-per-node={devices}", "--node-rank={rank}",
    "--master-addr={address}", "--master-port={port}",
)  # fmt: skip


@pytest.mark.usefixtures("beside_others")
@pytest.mark.parametrize(
    ("words", "devices", "before", "logs"),
    [
        (("script.start=torchrun", "script.torchrun=[--max-restarts=0]"), 1, (), 2),
        *in_full(
            [
                (("script.start=torchrun",), 2, (), 4),
                (("script.start=node",), 2, OWN_TORCHRUN, 2),
                (("script.start=ranks",), 2, (), 4),
            ]
        ),
    ],
)
def test_the_loss_curve_of_two_hosts_equals_that_of_one_process(
    site: Site, words: tuple[str, ...], devices: int, before: tuple[str, ...], logs: int
) -> None:
    line = (
        *words,
        "nodes=2",
        f"gpus_per_node={devices}",
        "launcher=slurm",
        "launcher.wait=true",
        "--",
        *before,
    )
    done = site.run(*line, "ddp.py", "--steps", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = only_run(site)
    assert len(list((folder / "logs").glob("rank-*.out"))) == logs
    assert printed_losses(folder) == pytest.approx(losses_alone("ddp.py", "--steps", "4"), rel=1e-5)
    curve = json.loads((site.home / "losses.json").read_text())  # where the command was typed
    assert curve == pytest.approx(printed_losses(folder), rel=1e-5)
    environment, summary = read(folder, "environment.json"), read(folder, "summary.json")
    hosts = {rank["host"] for rank in environment["ranks"]}
    assert len(hosts) == 2, hosts
    assert words[0] != "script.start=ranks" or environment["fabric"]["GLOO_SOCKET_IFNAME"] == "fabric0"
    assert (summary["outcome"], summary["world_size"]) == ("completed", logs)
    record = site.record(*summary["job_ids"])
    assert (record["JobState"], record["NumNodes"], record["NumTasks"]) == ("COMPLETED", "2", str(logs))


@pytest.mark.usefixtures("beside_others")
@pytest.mark.parametrize("start", ["openmpi", pytest.param("mpich", marks=pytest.mark.full)])
def test_a_plain_mpi_program_runs_under_mpirun(start: str, site: Site) -> None:
    words = ("nodes=2", "gpus_per_node=2", "launcher=slurm", "launcher.wait=true", *words_of(start, site))
    done = site.run(*words, "run_dir=run", "--", "mpi_sum.py")
    assert done.returncode == 0, done.stdout + done.stderr
    printed = [(site.home / "run" / "logs" / f"rank-{rank}.out").read_text() for rank in range(4)]
    assert printed == [f"rank {rank} of 4: sum 6\n" for rank in range(4)]
    failed = site.run(*words, "run_dir=failed", "--", "mpi_sum.py", "--fail")
    assert failed.returncode == 1
    line = read(site.home / "failed", "failure.json")["line"]
    host = site.record(*read(site.home / "failed", "summary.json")["job_ids"])["BatchHost"]
    assert re.fullmatch(rf"rank 1 on {host} failed first: the script ended with exit code 3.*", line), line


SAVES = """
import os, pathlib, signal, sys, time
saved = pathlib.Path(sys.argv[1])
if "--resume" in sys.argv:
    sys.exit(print("resumed from", saved.read_text()))
def stop(number, frame):
    if os.environ["RANK"] == "0":
        saved.write_text(f"signal {number}")
    sys.exit(0)
signal.signal(signal.SIGUSR1, stop)
print("ready", flush=True)
time.sleep(200)
"""


@pytest.mark.usefixtures("beside_others")
@pytest.mark.parametrize(
    "start", ["ranks", *(pytest.param(start, marks=pytest.mark.full) for start in ("torchrun", "openmpi"))]
)
def test_a_stop_signal_lets_the_script_save_and_the_job_starts_again(start: str, site: Site) -> None:
    """As before the time limit: Slurm sends USR2 to every process of the step, or to the shell of mpirun."""
    (site.home / "saves.py").write_text(SAVES)
    by = words_of(start, site) if start == "openmpi" else [f"script.start={start}"]
    words = ("nodes=2", "launcher=slurm", "script.stop_signal=SIGUSR1", "run_dir=run", *by)
    resume = "script.resume_arguments=--resume {run}/saved"
    assert site.run(*words, resume, "--", "saves.py", "{run}/saved").returncode == 0
    folder = site.home / "run"
    outs = [folder / "logs" / f"rank-{rank}.out" for rank in (0, 1)]
    wait_for(lambda: all(out.exists() and "ready" in out.read_text() for out in outs))
    job_id = read(folder, "owner.json")["job_id"]
    (row,) = json.loads(site.command("status", "run", "--json").stdout)
    assert (row["state"], row["last_line"], row["time_left_s"]) == ("running", "ready", None)
    assert 0 < row["job_left_s"] <= 3600  # launcher.time_minutes is 60
    site.cluster.run("scancel", "--signal=USR2", *(["--batch"] if start == "openmpi" else []), job_id)
    wait_for(lambda: "resumed from signal 10" in outs[0].read_text(), within_s=300)
    wait_for((folder / "summary.json").exists)
    summary = read(folder, "summary.json")
    assert (summary["outcome"], summary["restarts"], summary["job_ids"]) == ("completed", 1, [job_id])


AGREES = """
import os, time
from hpc_parallel import job_context
print("start", job_context.restarts, flush=True)
step = 0
while job_context.restarts == 0:
    time.sleep(0.1 if step or os.environ["RANK"] == "0" else 2)  # rank 1 is some steps behind
    step += 1
    if job_context.stop_requested(step):
        (job_context.checkpoint_folder / os.environ["RANK"]).write_text(str(step))
        break
    print("step", step, flush=True)
"""


@pytest.mark.full
@pytest.mark.parametrize("signal", ["USR2", "TERM"])
def test_ranks_on_two_hosts_stop_at_the_same_step_and_the_job_starts_again(site: Site, signal: str) -> None:
    """As before the time limit, and at a preemption: Slurm signals every process of the step."""
    (site.home / "agrees.py").write_text(AGREES)
    words = ("nodes=2", "launcher=slurm", "run_dir=run", "--", "agrees.py")
    assert site.run(*words).returncode == 0
    folder = site.home / "run"
    outs = [folder / "logs" / f"rank-{rank}.out" for rank in (0, 1)]
    wait_for(lambda: all(out.exists() and "step 2" in out.read_text() for out in outs))
    job_id = read(folder, "owner.json")["job_id"]
    site.cluster.run("scancel", f"--signal={signal}", job_id)
    wait_for(lambda: all((folder / "checkpoints" / rank).exists() for rank in "01"))
    steps = {(folder / "checkpoints" / rank).read_text() for rank in "01"}
    assert len(steps) == 1
    if signal == "TERM":  # by hand it is no preemption, so the run is cancelled
        wait_for((folder / "summary.json").exists)
        assert read(folder, "summary.json")["outcome"] == "cancelled"
        return
    wait_for(lambda: all("start 1" in out.read_text() for out in outs), within_s=300)
    wait_for((folder / "summary.json").exists)
    assert read(folder, "summary.json")["outcome"] == "completed"


@pytest.mark.full
def test_a_hang_over_three_hosts_names_the_rank_that_is_behind(site: Site) -> None:
    (site.home / "hangs.py").write_text("""
import os, time
def load(): time.sleep(600)
def wait(): time.sleep(600)
print("step 1", flush=True)
load() if os.environ["RANK"] == "0" else wait()
""")
    words = ("nodes=3", "launcher=slurm", "launcher.wait=true", "launcher.max_restarts=0", "run_dir=run")
    done = site.run(*words, "cluster.hang_timeout_s=5", "--", "hangs.py")
    assert done.returncode == 1
    line = read(site.home / "run", "failure.json")["line"]
    assert re.search(
        r"rank 0 on \S+ failed first: hangs at \S+:3 in load; others wait at \S+:4 in wait", line
    )
    stacks = [(site.home / f"run/logs/rank-{rank}.stacks").read_text() for rank in (0, 1, 2)]
    assert ["in load" in text for text in stacks] == [True, False, False]
    assert ["in wait" in text for text in stacks] == [False, True, True]
