"""Packed jobs: which runs share one, what is refused, and how the loop inside gives places and turns."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_parallel.__main__ import main as command
from hpc_parallel.failure import packed_job
from hpc_parallel.failure.run_state import states
from hpc_parallel.launch.batch_script import render_pack, render_packed
from hpc_parallel.launch.prepare import PreparedRun
from hpc_parallel.record import attempts, owner
from hpc_parallel.record.recorded import read_run
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.record.typed import read_record, write_record
from hpc_parallel.run import main
from hpc_parallel.slurm import limits
from hpc_parallel.slurm.jobs import Job
from hpc_parallel.slurm.node_room import FreePlaces, Need, Room, RunPlace, SharedGpus, least_nodes, makespan_s
from hpc_parallel.sweep import pack_runs
from tests.composed import prepared
from tests.recorded_runs import prepared as recorded

# As sinfo -o "%P|%D|%m|%l|%G|%c|%N": the default partition has two kinds of nodes.
SINFO = """gpu*|8|512000|1-00:00:00|gpu:a100:4|64|
gpu*|4|256000|1-00:00:00|gpu:a100:4|48|
cpu|4|64000|1:00:00||16|
"""
WORDS = ("launcher=slurm", "launcher.snapshot=false", "sweep.pack=auto", "strategy=single")
ROOT = Path(__file__).resolve().parents[2]
NODE = Room(cpus=8, gpus=4, memory_mb=1000)
ONE, TWO = Need(1, Room(2, 1, 250)), Need(1, Room(4, 2, 500))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["run"])
    monkeypatch.setattr(limits, "_sinfo", lambda minute: SINFO)
    return tmp_path


def runs(count: int, *words: str) -> list[PreparedRun]:
    return [prepared(*WORDS, *words, f"seed={seed}") for seed in range(count)]


def sizes(packs: Sequence[pack_runs.Pack]) -> list[tuple[int, int]]:
    """The runs and the nodes of each job."""
    return [(len(pack.positions), pack.nodes) for pack in packs]


def test_a_place_is_on_the_fullest_node_and_is_free_again() -> None:
    places = FreePlaces(2, NODE)
    assert [places.take(need) for need in (TWO, ONE, ONE, TWO, TWO)] == [(0,), (0,), (0,), (1,), (1,)]
    assert places.take(ONE) is None
    places.give_back((0,), ONE)
    assert [places.take(Need(2, ONE.room)), places.take(ONE), places.take(ONE)] == [None, (0,), None]
    assert FreePlaces(2, NODE).take(Need(1, Room(1, 0, 1001))) is None  # memory counts as well


@pytest.mark.parametrize("seconds", list(itertools.combinations_with_replacement((1, 2, 3), 5)))
def test_the_end_is_that_of_a_list_of_two_servers(seconds: tuple[int, ...]) -> None:
    """Two places: each run goes to the one that is free first."""
    servers = [0, 0]
    for time_s in seconds:
        servers[servers.index(min(servers))] += time_s
    work = [(TWO, float(time_s)) for time_s in seconds]
    assert makespan_s(work, nodes=1, room=NODE) == max(servers)


def test_a_small_run_passes_a_large_one_that_has_no_place_yet() -> None:
    whole = Need(2, NODE)
    assert makespan_s([(ONE, 2.0), (whole, 5.0), (ONE, 1.0)], nodes=2, room=NODE) == 7.0
    assert [least_nodes([ONE] * count, most=4, room=NODE) for count in (1, 4, 5, 40)] == [1, 1, 2, 4]


def test_runs_go_into_jobs_that_end_before_their_limit() -> None:
    """A run may take its time limit, so each job has as many as have a place at once; the longest first."""
    assert sizes(pack_runs.packs(runs(9, "sweep.pack_nodes=2"))) == [(8, 2), (1, 1)]
    assert sizes(pack_runs.packs(runs(9, "sweep.pack_nodes=2", "sweep.pack_minutes=120"))) == [(9, 2)]
    mixed = [*runs(3, "launcher.time_minutes=10"), *runs(3, "strategy=data", "nodes=2")]
    (pack,) = pack_runs.packs(mixed)
    assert (list(pack.positions), pack.nodes) == ([3, 4, 5, 0, 1, 2], 2)
    assert pack.queue.room == Room(48, 4, 256000)  # the least of the nodes
    # A quarter of the least node: 12 of 48 CPUs, and of the memory what the profile leaves to one device.
    assert pack.queue.runs[0] == packed_job.QueuedRun(Need(2, Room(12, 1, 56 * 1024)), tasks=1)
    assert pack_runs.need_of(runs(1, "launcher.memory_gb=1.5")[0], pack.queue.room).room.memory_mb == 1536
    of_cpus = runs(1, "cluster=cpu", "launcher.cpus_per_device=5", "launcher.partition=cpu")[0]
    assert pack_runs.need_of(of_cpus, Room(16, 0, 64000)) == Need(1, Room(5, 0, 64000 // 3))


@pytest.mark.parametrize(
    ("words", "packed"),
    [
        ((), True), (("sweep.pack=off",), False), (("launcher=script",), False), (("launcher=local",), False),
        (("launcher=local", "sweep.pack=auto"), True),
    ],
)  # fmt: skip
def test_the_profile_chooses_for_jobs_of_slurm(words: Sequence[str], packed: bool) -> None:
    run = prepared(*WORDS, "sweep.pack=null", "cluster.pack=auto", *words)
    assert (pack_runs.choice(run.config) == "auto") == packed
    assert list(pack_runs.find_problems([run])) == []


def test_a_refusal_names_the_profile(capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for word in WORDS if word != "sweep.pack=auto"]
    assert main(["-m", *words, "cluster.pack=auto", "seed=1,2", "sweep.parallelism=2"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "  cluster.pack=auto: generic packs sweeps. Try sweep.pack=off for separate jobs."
    )


def test_whole_nodes_stay_an_array(capsys: pytest.CaptureFixture[str]) -> None:
    assert pack_runs.packs(runs(3, "gpus_per_node=4", "strategy=data")) == []
    assert main(["-m", *WORDS, "seed=1,2", "gpus_per_node=4", "strategy=data", "dry_run=true"]) == 0
    assert "#SBATCH --array=0-1" in capsys.readouterr().out


def test_the_planned_time_counts() -> None:
    planned = runs(1, "plan.hardware=h100_sxm_node8_3200gbit", "model=tiny", "training.steps=1000")[0]
    assert planned.predicted is not None
    assert pack_runs.seconds_of(planned) == 1000 * planned.predicted["step_time_s"]
    assert pack_runs.seconds_of(runs(1)[0]) == 3600


def test_all_refusals_come_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("launcher.partition=gpu,cpu", "nodes=1,4", "sweep.pack_nodes=2", "sweep.pack_minutes=30",
             "cluster.start=torchrun", "cluster.port=29500", "sweep.parallelism=2",
             "+launcher.extra.mem-per-cpu=1G", "launcher.cpus_per_device=50", "launcher.spares=1",
             "launcher.min_nodes=1", "launcher.max_restarts=1")  # fmt: skip
    assert main(["-m", *WORDS, "strategy=data", *words]) == 2
    error = capsys.readouterr().err
    for text in (
        "launcher.partition = [gpu,cpu] has several values, and a packed job has one. Try launcher.partition",
        "sweep.pack_nodes = 2 is fewer than nodes=4 of a run. Try sweep.pack_nodes=4.",
        "sweep.pack_minutes = 30 is less than launcher.time_minutes=60 of a run. Try sweep.pack_minutes=60.",
        "cluster.start = torchrun meets at one port of its job, which runs side by side can't share. Try "
        "cluster.start=srun.",
        "cluster.port = 29500 is one port, which runs side by side can't share. Try cluster.port=null.",
        "sweep.parallelism = 2 is for arrays",
        "launcher.spares = 1 is for a job that has one run. Try launcher.spares=0.",
        "launcher.min_nodes = 1 is for a job that has one run. Try launcher.min_nodes=null.",
        "launcher.extra.mem-per-cpu = 1G contradicts a packed job",
        "launcher.cpus_per_device = 50 needs 50 CPUs of a node, and nodes of partition gpu have 48. Try "
        "launcher.cpus_per_device=48.",
    ):
        assert text in error
    assert not Path("runs").exists()
    assert main(["-m", *WORDS, "strategy=data", "launcher.max_restarts=1", "launcher.standby=true"]) == 2
    told = "launcher.standby = true is for a job that has one run. Try launcher.standby=false."
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("cluster.gpus=true,false",), "cluster.gpus = [true,false] has several values"),
        (("launcher=script",), "and not with launcher.kind=script. Try sweep.pack=off."),
        (("launcher=local", "sweep.pack_nodes=2"), "sweep.pack_nodes = 2 has no effect on this machine. Try "
         "sweep.pack_nodes=null."),
        (("sweep.pack=off", "sweep.pack_minutes=2"), "sweep.pack_minutes = 2 needs sweep.pack=auto."),
        (("launcher.partition=gone",), "needs to know what the nodes of partition gone have"),
        (("cluster.gpu_flag=none",), "cluster.gpu_flag = none leaves no way to give each run"),
        (("sweep.pack=off", "sweep.runs_per_gpu=2"), "sweep.runs_per_gpu = 2 needs sweep.pack=auto."),
        (("sweep.runs_per_gpu=2",), "sweep.runs_per_gpu = 2 needs a plan of the memory (hardware=NAME)"),
        (("sweep.runs_per_gpu=2", "nodes=1,2", "strategy=data"), "is for runs of one GPU, and a run has 2"),
        (("sweep.runs_per_gpu=2", "cluster=cpu", "launcher.partition=cpu"), "is for runs on GPUs, and these"),
        (("sweep.runs_per_gpu=2", "launcher=local"), "is for runs on GPUs, and these are on CPUs."),
        (("sweep.runs_per_gpu=2,3",), "sweep.runs_per_gpu = [2,3] has several values"),
    ],
)  # fmt: skip
def test_what_has_no_packed_job_is_refused(
    words: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-m", *WORDS, "gpus_per_node=1", "seed=1,2", *words]) == 2
    assert text in capsys.readouterr().err


def test_runs_that_need_more_than_their_share_of_a_gpu_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The proposal itself is accepted, and the next number is not."""
    words = [*WORDS, "plan.hardware=h100_sxm_node8_3200gbit", "model=tiny", "seed=1,2", "dry_run=true"]
    assert main(["-m", *words, "sweep.runs_per_gpu=1000"]) == 2
    error = capsys.readouterr().err
    pattern = r"runs_per_gpu = 1000 leaves [\d.]+ MiB of the memory of a GPU .* Try sweep.runs_per_gpu=(\d+)"
    found = re.search(pattern, error)
    assert found is not None, error
    most = int(found[1])
    assert 1 < most < 1000
    assert main(["-m", *words, f"sweep.runs_per_gpu={most + 1}"]) == 2
    assert main(["-m", *words, f"sweep.runs_per_gpu={most}"]) == 0
    assert main(["-m", *words, "sweep.runs_per_gpu=1000", "plan.on_overflow=off"]) == 0


def test_runs_share_gpus_evenly() -> None:
    gpus = SharedGpus(2, 2)
    assert [gpus.take(1, node=node) for node in (0, 0, 0, 0, 1)] == [[0], [1], [0], [1], [0]]
    gpus.give_back([1])
    gpus.give_back([1])
    assert [gpus.take(1), gpus.take(1)] == [[1], [1]]
    shared = runs(9, "sweep.runs_per_gpu=2", "gpus_per_node=1")
    first, second = pack_runs.packs(shared)
    assert sizes([first, second]) == [(8, 1), (1, 1)]  # two on each of four GPUs
    assert (first.queue.room.gpus, first.queue.runs_per_gpu) == (4, 2)
    assert first.queue.runs[0].need.room == Room(6, 1, 28 * 1024)
    script = render_packed(shared[0], first.queue.runs[0].need, room=first.queue.room)
    (srun,) = [shlex.split(line) for line in script.splitlines() if line.startswith("srun ")]
    assert {*srun} >= {"--overlap", "--cpus-per-task=48", "--mem=0", "--gpus-per-node=4", "--cpu-bind=none"}
    assert "--exact" not in srun
    choice = srun[srun.index("sh") :][:4]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "4,6,7", "hpc_parallel_gpu": "3"}
    words = [*choice, "sh", "-c", "echo $CUDA_VISIBLE_DEVICES"]
    assert subprocess.check_output(words, env=environment, text=True) == "7\n"


def test_the_loop_gives_each_run_its_share_of_a_gpu(
    here: Path, queue: list[RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four runs at a time on two hosts with one GPU each."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for folder in queue:
        count = "$SLURM_RESTART_COUNT"
        noted = folder.batch_script.read_text().replace(count, f"{count} $hpc_parallel_gpu $OMP_NUM_THREADS")
        folder.batch_script.write_text(noted)
    half = Need(1, Room(2, 1, 100))
    queued = tuple(packed_job.QueuedRun(half, tasks=1) for _ in queue)
    write_record(here / "queue.json", packed_job.Queue(Room(4, 1, 500), 1, queued, runs_per_gpu=2))
    assert job(here) == 0
    began = [line.split()[1:] for line in events(here, "began")]
    assert sorted(words[0] for words in began[:4]) == ["n1", "n1", "n2", "n2"]
    assert {tuple(words[2:]) for words in began} == {("1", "2")}


def test_runs_on_this_machine_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(8))
    words = ("launcher=local", "launcher.snapshot=false", "strategy=single", "sweep.runs_per_gpu=2")
    machine = pack_runs.LocalPlaces({"CUDA_VISIBLE_DEVICES": "3,5", "OMP_NUM_THREADS": "1"}, runs_per_gpu=2)
    several = [prepared(*words, "gpus_per_node=1", f"seed={seed}") for seed in range(5)]
    taken = [machine.take(run) for run in several]
    assert taken == [*(RunPlace({"CUDA_VISIBLE_DEVICES": gpu}) for gpu in "3535"), None]
    machine.give_back(several[1])
    assert machine.take(several[4]) == RunPlace({"CUDA_VISIBLE_DEVICES": "5"})


def test_the_scripts_take_whole_nodes_and_a_place(tmp_path: Path) -> None:
    run = runs(1, "strategy=data", "nodes=2", "gpus_per_node=2")[0]
    room, need = Room(48, 4, 256000), Need(2, Room(24, 2, 1000))
    words = {"queue": tmp_path / "a b", "name": "study", "nodes": 3, "room": room}
    pack = render_pack(run, **words, minutes=90, grace_s=600)
    flags = {line.removeprefix("#SBATCH --") for line in pack.splitlines() if line.startswith("#SBATCH")}
    assert flags >= {
        "job-name=study", "nodes=3", "ntasks-per-node=1", "cpus-per-task=48", "time=90", "exclusive", "mem=0",
        "gpus-per-node=4", "signal=USR2@600", f"output='{tmp_path}/a b/%j.out'", "requeue",
    }  # fmt: skip
    assert f"-m hpc_parallel.job pack '{tmp_path}/a b'" in pack
    script = render_packed(run, need)
    (srun,) = [shlex.split(line) for line in script.splitlines() if line.startswith("srun ")]
    assert {*srun} >= {
        "--exact", "--nodes=2", "--nodelist=$SLURM_JOB_NODELIST", "--ntasks=4", "--ntasks-per-node=2",
        "--cpus-per-task=12", "--mem=1000M", "--gpus-per-node=2",
    }  # fmt: skip
    assert "--overlap" not in srun
    assert "exec {hpc_parallel_place}>&-" in script
    if (shellcheck := shutil.which("shellcheck")) is not None:
        for number, text in enumerate((pack, script)):
            (tmp_path / f"{number}.sh").write_text(text)
        subprocess.run([shellcheck, "-S", "warning", tmp_path / "0.sh", tmp_path / "1.sh"], check=True)


# Plays the batch script of a run: it notes its start and its end, and ends as the file `plan` says.
SCRIPT = """
cd "$(dirname "$0")"
echo "began $(basename $PWD) $SLURM_JOB_NODELIST $SLURM_RESTART_COUNT" >> ../events
sleep 0.5
echo "ended $(basename $PWD)" >> ../events
printf '{"outcome": "%s"}' "$(cat plan)" > summary.json
[ "$(cat plan)" != preempted ] || { printf completed > plan; cp ../stopped.json .; }
"""
# Plays Slurm: the job is at its end, and it is noted what is asked for.
SLURM = {
    "scontrol": 'echo "scontrol $*" >> events; echo "JobId=7 JobState=RUNNING Restarts=0 Requeue=1"',
    "squeue": """case "$*" in
        *--steps*) ;;
        *%o*) echo "7|7|$(cat script)" ;;
        *) echo "7|7|$(cat state)|1:00|2:00|Unknown|None" ;;
    esac""",
    "scancel": 'echo "scancel $*" >> events',
}


def program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def queue(here: Path, monkeypatch: pytest.MonkeyPatch) -> list[RunFolder]:
    """Five runs in a queue for a job of two hosts, each with a place for one run."""
    (here / "bin").mkdir()
    for name, script in SLURM.items():
        program(here / "bin" / name, script)
    monkeypatch.setenv("PATH", f"{here / 'bin'}:{os.environ['PATH']}")
    (here / "state").write_text("RUNNING")
    (here / "stopped.json").write_text('{"signal": "SIGUSR2", "step": 3, "how": "time_limit"}')
    here.chmod(0o700)
    folders = []
    for number in range(5):
        folder = recorded(here / f"run{number}", "launcher=slurm")
        folder.slurm.mkdir(exist_ok=True)
        folder.batch_script.write_text(SCRIPT)
        (folder.path / "plan").write_text("completed")
        owner.queue_in_job(folder, Job("7"))
        (here / str(number)).symlink_to(folder.path)
        folders.append(folder)
    queued = tuple(packed_job.QueuedRun(TWO, tasks=1) for _ in folders)
    write_record(here / "queue.json", packed_job.Queue(Room(4, 2, 500), 1, queued))
    return folders


def job(here: Path, *, restarts: int = 0, left_s: float = 600.0) -> int:
    """Run the packed job to its end, as a process of its own."""
    environment = {
        **os.environ, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_RESTART_COUNT": str(restarts),
        "SLURM_JOB_END_TIME": str(int(time.time() + left_s)), "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    words = [sys.executable, "-m", "hpc_parallel.job", "pack", str(here)]
    return subprocess.run(words, env=environment, check=False, timeout=240).returncode


def events(here: Path, word: str) -> list[str]:
    lines = (here / "events").read_text().splitlines() if (here / "events").exists() else []
    return [line.removeprefix(f"{word} ") for line in lines if line.startswith(f"{word} ")]


def names(folders: Sequence[RunFolder]) -> list[str]:
    return [str(state) for state in states([read_run(folder.path) for folder in folders])]


def test_status_and_cancel_see_runs_and_not_their_job(
    here: Path, queue: list[RunFolder], capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in queue[:3]:
        assert owner.take_turn(folder)
        owner.hold_by_job(folder, "7", step="3")  # what the ranks do
    write_json(queue[1].summary, {"outcome": "failed"})
    owner.end_turn(queue[1])
    owner.wait_again(queue[2])
    turn = "pending (its turn in job 7)"
    assert names(queue) == ["running", "failed", turn, turn, turn]
    left_s = [state.left_s for state in states([read_run(folder.path) for folder in queue])]
    assert left_s == [60, None, 60, 60, 60]
    assert command(["cancel", "run0", "run1", "run3", "--yes"]) == 0
    assert "run1 has ended: failed" in capsys.readouterr().err
    assert events(here, "scancel") == ["--ctld --signal=TERM 7.3"]  # never the job
    assert names(queue) == ["running", "failed", turn, "cancelled", turn]
    (here / "state").write_text("PENDING")
    assert names(queue) == ["pending", "failed", "pending", "cancelled", "pending"]
    assert [owner.take_turn(folder) for folder in queue] == [False, False, True, False, True]
    (here / "state").write_text("TIMEOUT")
    assert names(queue) == ["timeout", "failed", "timeout", "cancelled", "timeout"]


def test_the_last_cancel_takes_a_waiting_job_out_of_the_queue(here: Path, queue: list[RunFolder]) -> None:
    (here / "state").write_text("PENDING")
    (here / "script").write_text(str(here / "batch_script.sh"))
    assert command(["cancel", *(f"run{number}" for number in range(4)), "--yes"]) == 0
    assert events(here, "scancel") == []
    assert command(["cancel", "run4", "--yes"]) == 0
    assert events(here, "scancel") == ["7"]


def test_a_run_that_waits_for_another_turn_can_be_cancelled(here: Path, queue: list[RunFolder]) -> None:
    write_json(queue[0].summary, {"outcome": "preempted"})
    assert command(["cancel", "run0", "--yes"]) == 0
    assert names(queue[:1]) == ["cancelled"]
    assert json.loads(queue[0].summary.read_text())["outcome"] == "cancelled"


def test_runs_on_this_machine_share_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    local = ("launcher=local", "launcher.snapshot=false", "strategy=data", "gpus_per_node=2")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(8))
    machine = pack_runs.LocalPlaces({"CUDA_VISIBLE_DEVICES": "3,5,7,9"})
    first, second, third = (prepared(*local, f"seed={seed}") for seed in range(3))
    assert machine.take(first) == RunPlace({"CUDA_VISIBLE_DEVICES": "3,5", "OMP_NUM_THREADS": "1"})
    assert machine.take(second) == RunPlace({"CUDA_VISIBLE_DEVICES": "7,9", "OMP_NUM_THREADS": "1"})
    assert machine.take(third) is None
    machine.give_back(first)
    assert machine.take(third) == RunPlace({"CUDA_VISIBLE_DEVICES": "3,5", "OMP_NUM_THREADS": "1"})
    of_cpus = [prepared(*local, "device=cpu", "launcher.cpus_per_device=2", f"seed={at}") for at in range(3)]
    machine = pack_runs.LocalPlaces({"CUDA_VISIBLE_DEVICES": ""})
    assert [machine.take(run) for run in of_cpus] == [
        RunPlace({"OMP_NUM_THREADS": "2"}),
        RunPlace({"OMP_NUM_THREADS": "2"}),
        None,
    ]
    larger = prepared(*local, "device=cpu", "launcher.cpus_per_device=9")  # has the machine for itself
    assert machine.take(larger) is None
    for run in of_cpus[:2]:
        machine.give_back(run)
    assert machine.take(larger) == RunPlace({"OMP_NUM_THREADS": "4"})
    assert machine.take(of_cpus[2]) is None


def test_the_loop_gives_each_run_one_turn(here: Path, queue: list[RunFolder]) -> None:
    (queue[1].path / "plan").write_text("failed")
    assert owner.withdraw(queue[2])  # `cancel` of a run that waits
    assert job(here) == 1  # one failed
    began = events(here, "began")
    assert {line.split()[0] for line in began[:2]} == {"run0", "run1"}  # in the order of the queue
    assert sorted(line.split()[0] for line in began) == ["run0", "run1", "run3", "run4"]
    assert {line.split()[1] for line in began} == {"n1", "n2"}
    order = [line for line in (here / "events").read_text().splitlines() if line[:5] in ("began", "ended")]
    active = [
        sum(+1 if line.startswith("began") else -1 for line in order[:at]) for at in range(len(order) + 1)
    ]
    assert (max(active), active[-1]) == (2, 0)  # two places, both in use
    assert [(owner.Owner.read(folder) or owner.Owner()).over for folder in queue] == [True] * 5
    assert owner.living_owner(queue[0]) is None  # so it can be resumed while the job goes on
    assert job(here, restarts=1) == 0  # nothing is left
    assert events(here, "began") == began


def test_a_place_is_free_while_the_script_concludes(here: Path, queue: list[RunFolder]) -> None:
    """A run of the first two closes its end of the pipe; the next one starts before its script has ended."""
    late = "while ! grep -q 'began run2' ../events; do sleep 0.05; done\n"
    text = queue[0].batch_script.read_text().replace("sleep 0.5\n", f"exec {{hpc_parallel_place}}>&-\n{late}")
    queue[0].batch_script.write_text(text)
    waits = queue[1].batch_script.read_text().replace("sleep 0.5\n", late)
    queue[1].batch_script.write_text(waits)
    (queue[3].path / "plan").write_text("pruned")  # which is no failure
    assert job(here) == 0
    assert len(events(here, "began")) == 5


def test_at_the_time_limit_the_unfinished_go_on_in_the_next_job(here: Path, queue: list[RunFolder]) -> None:
    for folder in queue[:2]:
        (folder.path / "plan").write_text("preempted")
    assert job(here) == 1
    assert sorted(line.split()[0] for line in events(here, "began")) == ["run0", "run1"]  # none after it
    assert "requeue 7" in events(here, "scontrol")
    (here / "state").write_text("PENDING")
    assert names(queue) == ["pending"] * 5
    assert job(here, restarts=1) == 0
    again = [line.split() for line in events(here, "began")[2:]]
    assert sorted(name for name, _, _ in again) == [f"run{number}" for number in range(5)]
    assert {count for _, _, count in again} == {"1"}


def test_a_resumed_run_has_its_turn_though_its_job_starts_before_it_is_named(
    here: Path, queue: list[RunFolder]
) -> None:
    """The submission names its job only after all of a sweep's jobs are submitted."""
    record = read_record(packed_job.Queue, here / "queue.json")
    assert record is not None
    write_record(here / "queue.json", replace(record, submitter=owner.this_process().process))
    for folder in queue:
        attempts.begin(folder, step=0, environment={})
    owner.take(queue[0])  # as the submission has claimed it
    write_json(queue[1].owner, {"host": "elsewhere", "pid": 5, "began": "x"})  # resumed there since
    assert job(here) == 0
    assert sorted(line.split()[0] for line in events(here, "began")) == ["run0", "run2", "run3", "run4"]


def test_a_job_that_starts_while_it_is_named_stays_the_owner(
    here: Path, queue: list[RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, read = queue[0], owner.Owner.read
    owner.take(folder)
    submission = threading.Thread(target=owner.hand_to_job, args=(folder, Job("7")))

    def slowly(of: RunFolder) -> owner.Owner | None:
        found = read(of)
        if submission.ident is None:
            submission.start()
            submission.join(0.5)
        return found

    monkeypatch.setattr(owner.Owner, "read", slowly)
    owner.hold_by_job(folder, "7", step="3")
    submission.join()
    assert (read(folder) or owner.Owner()).job_id == "7"


def test_a_new_job_begins_only_after_the_old_one_has_named_it(here: Path, queue: list[RunFolder]) -> None:
    """It would leave out runs that still belong to the old one."""
    for name, script in {
        "scontrol": """[ "$1" != requeue ] || exit 1; echo "JobId=7 JobState=RUNNING Restarts=0" """,
        "sbatch": 'echo "sbatch $*" >> events; echo 8',
    }.items():
        program(here / "bin" / name, script)
    config = queue[0].read_config()
    config["launcher"]["resubmit"] = True
    queue[0].config.write_text(json.dumps(config))
    queue[0].resubmission.write_text("#!/bin/bash\n")
    assert job(here, left_s=0) == 1
    (words,) = events(here, "sbatch")
    assert "--dependency=afterany:7" in words.split()
    owners = [owner.Owner.read(folder) or owner.Owner() for folder in queue]
    assert {(each.job_id, each.waits) for each in owners} == {("8", True)}


def test_nothing_starts_near_the_time_limit_or_in_another_job(here: Path, queue: list[RunFolder]) -> None:
    owner.hand_to_job(queue[0], Job("8"))  # resumed by hand meanwhile
    write_json(queue[1].owner, {"host": "elsewhere", "pid": 5, "began": "x"})
    assert job(here, restarts=1, left_s=0) == 1
    assert events(here, "began") == []
    assert "requeue 7" in events(here, "scontrol")
    assert job(here, restarts=2) == 0
    assert sorted(line.split()[0] for line in events(here, "began")) == ["run2", "run3", "run4"]
