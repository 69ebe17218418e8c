"""The allocation that a shell is in: what Slurm says of it, what a run gets there, and how the run ends."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from hpc_parallel.__main__ import main
from hpc_parallel.commands.run_command import launch
from hpc_parallel.config.node_devices import choose_launcher
from hpc_parallel.exit_codes import REFUSED
from hpc_parallel.failure.conclude_run import conclude
from hpc_parallel.launch.batch_script import render
from hpc_parallel.problems import ConfigError
from hpc_parallel.record import owner
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.record.values import step_id
from hpc_parallel.run import main as run_main
from hpc_parallel.slurm import allocation, client
from hpc_parallel.slurm.allocation import Allocation, own_step, read_answer, variables_of_steps
from hpc_parallel.slurm.node_room import Need, Room, RunPlace
from hpc_parallel.sweep import pack_runs
from tests.composed import prepared
from tests.recorded_runs import started

# Slurm 22.05, `scontrol --oneliner --details show job`, shortened.
RECORD = (
    "JobId=7 JobName=interactive UserId=ada(1000) GroupId=ada(1000) JobState=RUNNING Reason=None Requeue=1 "
    "NodeList=n[1-2,4] BatchHost=n1 NumNodes=3 NumCPUs=20 TRES=cpu=20,mem=4000M,node=3 JOB_GRES=gpu:a100:10 "
    "  Nodes=n[1-2] CPU_IDs=0-7 Mem=2000 GRES=gpu:a100:4(IDX:0-3)   Nodes=n4 CPU_IDs=0,2-4 Mem=2000 "
    "GRES=gpu:a100:2(IDX:0,2) MinCPUsNode=1 Command=bash TresPerNode=gres:gpu:2 "
)
WITHOUT_GPUS = (
    "JobId=7 UserId=ada(1000) JobState=RUNNING NodeList=n[1-2] NumNodes=2 NumCPUs=2   Nodes=n[1-2] CPU_IDs=0 "
    "Mem=2000 GRES= MinCPUsNode=1"
)
SMALL = ("launcher.snapshot=false", "strategy=data")


@pytest.mark.parametrize(
    ("record", "user", "reason", "stale"),
    [
        ("", 1000, "SLURM_JOB_ID=7 of this shell is no job of this Slurm", True),
        (RECORD, 1001, "job 7 of SLURM_JOB_ID is another user's", True),
        (RECORD.replace("RUNNING", "TIMEOUT"), 1000, "job 7 of SLURM_JOB_ID does not run (timeout)", True),
        (RECORD, 1000, "", False),
    ],
)
def test_slurms_answer_decides(record: str, user: int, reason: str, stale: bool) -> None:
    answer = read_answer("7", record, user=user)
    assert (answer.reason, answer.is_stale) == (reason, stale)
    assert (answer.allocation is None) == bool(reason)


def test_the_smallest_node_counts() -> None:
    assert read_answer("7", RECORD, user=1000).allocation == Allocation("7", ("n1", "n2", "n4"), 4, 2, 2000)
    assert read_answer("7", WITHOUT_GPUS, user=1000).allocation == Allocation("7", ("n1", "n2"), 1, 0, 2000)


def test_a_shells_own_requests_do_not_reach_srun() -> None:
    shell = {
        "PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0", "SLURM_CONF": "/s.conf", "SLURM_JOB_PARTITION": "gpu",
        "SLURM_JOB_END_TIME": "1795876390", "SLURM_NTASKS": "1", "SLURM_CPU_BIND": "mask_cpu:0x1",
        "SLURM_STEP_ID": "0", "SLURM_MEM_PER_NODE": "100", "SLURM_RESTART_COUNT": "2", "SLURM_NNODES": "3",
        "SLURM_GPUS_PER_NODE": "4", "SLURMD_NODENAME": "n1", "SRUN_CPUS_PER_TASK": "1", "PMIX_RANK": "0",
        "SQUEUE_PARTITION": "x",
    }  # fmt: skip
    assert variables_of_steps(shell, job="7", hosts=("n1", "n2"), tasks=4) == {
        "PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0", "SLURM_CONF": "/s.conf", "SLURM_JOB_PARTITION": "gpu",
        "SLURM_JOB_END_TIME": "1795876390", "SLURM_JOB_ID": "7", "SLURM_JOBID": "7",
        "SLURM_JOB_NODELIST": "n1,n2", "SLURM_NODELIST": "n1,n2", "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NNODES": "2", "SLURM_TASKS_PER_NODE": "4(x2)",
    }  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A shell with SLURM_JOB_ID=7, and a Slurm whose answers are files."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    for name, script in {
        "scontrol": 'case "$*" in ping) echo "Slurmctld(primary) at login is UP" ;; *job*) cat job ;; '
                    '*step*) cat steps ;; esac',
        "srun": "exit 1", "sbatch": "exit 0", "sinfo": "exit 0",
        "scancel": "echo $* >> cancelled",
    }.items():  # fmt: skip
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    answer(RECORD)
    return tmp_path


def answer(record: str) -> None:
    Path("job").write_text(record.replace("(1000)", f"({os.geteuid()})"))
    allocation._asked.cache_clear()


@pytest.mark.usefixtures("here")
def test_auto_is_the_allocation_and_not_one_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_launcher("auto") == ("allocation", "inside the allocation of job 7")
    assert choose_launcher("slurm") == ("slurm", "")
    answer(RECORD.replace("RUNNING", "COMPLETED"))
    kind, reason = choose_launcher("auto")
    assert (kind, reason) == (
        "slurm",
        "job 7 of SLURM_JOB_ID does not run (completed); sbatch is here and Slurm's controller answers",
    )
    with pytest.raises(ConfigError, match="needs an allocation: job 7 of SLURM_JOB"):
        prepared("launcher=allocation", *SMALL)
    unconfigured = "echo fatal: Could not establish a configuration source >&2; exit 1"
    Path("bin/scontrol").write_text(f"#!/bin/sh\n{unconfigured}\n")
    allocation._asked.cache_clear()
    assert choose_launcher("auto") == ("local", "already inside job 7, and Slurm does not answer about it")
    monkeypatch.delenv("SLURM_JOB_ID")
    client._answers.cache_clear()
    assert choose_launcher("auto") == (
        "local", "sbatch is here, but `scontrol ping` finds no configuration of Slurm"
    )  # fmt: skip


@pytest.mark.usefixtures("here")
def test_nothing_starts_on_what_may_be_a_login_node(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID")
    monkeypatch.setattr(client, "_FIRST_PING_S", 0.5)
    for script in ("echo 'Slurmctld(primary) at head is DOWN'; exit 1", "exec sleep 60"):
        Path("bin/scontrol").write_text(f"#!/bin/sh\n{script}\n")
        client._answers.cache_clear()
        assert choose_launcher("auto") == (
            "slurm",
            "sbatch is here and Slurm's controller does not answer now",
        )
        assert launch(prepared("launcher=auto", *SMALL)) == REFUSED
        assert "nothing was started: try again later; launcher=local runs here" in capsys.readouterr().err
        assert not list(Path("runs").glob("*/*"))
    assert prepared("launcher=local", *SMALL).config.launcher.kind == "local"


@pytest.mark.usefixtures("here")
def test_a_run_that_does_not_fit_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError) as refused:
        prepared(*SMALL, "nodes=4", "gpus_per_node=3")
    nodes, gpus = map(str, refused.value.problems)
    assert nodes == (
        "nodes = 4 is more than the 3 nodes of job 7 (the allocation you are in). launcher=local simulates 4 "
        "nodes on this machine, and launcher=slurm submits a job of its own. Try nodes=3."
    )
    assert gpus.startswith("gpus_per_node = 3 is more than the 2 GPUs on each node of job 7")
    assert gpus.endswith("Try gpus_per_node=2.")
    run = prepared(*SMALL, "nodes=3", "gpus_per_node=2")  # what the messages name
    assert run.config.launcher.kind == "allocation"
    assert prepared(*SMALL, "gpus_per_node=auto").config.gpus_per_node == 2
    assert prepared(*SMALL, "device=cpu", "gpus_per_node=3").config.gpus_per_node == 3


@pytest.mark.usefixtures("here")
def test_without_gpus_the_cpus_train_and_are_shared() -> None:
    answer(WITHOUT_GPUS)
    run = prepared(*SMALL, "nodes=2", "gpus_per_node=2")
    assert (run.config.cluster.gpus, run.config.training.precision) == (False, "float32")
    assert [note for note in run.notes if "job 7" in note] == [
        "warning     job 7 (the allocation you are in) has no GPU, so this run uses CPUs",
        "warning     launcher.cpus_per_device=1: a node of job 7 (the allocation you are in) has 1 CPU for 2 "
        "processes, not 2",
    ]
    assert {"--overcommit", "--cpus-per-task=1"} <= set(srun(render(run)))


def srun(script: str) -> list[str]:
    (line,) = [line for line in script.replace("\\\n", " ").splitlines() if line.startswith("srun ")]
    assert line.endswith(" &")
    return shlex.split(line)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("start", "tasks", "cpus"), [("srun", 2, 2), ("torchrun", 1, 4)])
def test_the_script_takes_the_first_hosts_beside_other_steps(start: str, tasks: int, cpus: int) -> None:
    run = prepared(*SMALL, "nodes=2", "gpus_per_node=2", f"cluster.start={start}")
    script = render(run)
    assert {
        "--overlap", "--mem=0", "--nodes=2", "--nodelist=n1,n2", f"--ntasks={2 * tasks}",
        f"--ntasks-per-node={tasks}", f"--cpus-per-task={cpus}",
    } <= set(srun(script))  # fmt: skip
    assert "--overcommit" not in script


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("start", ["srun", "torchrun", "mpirun"])
def test_the_script_is_legal_shell(start: str) -> None:
    Path("script").write_text(render(prepared(*SMALL, "nodes=2", f"cluster.start={start}")))
    reader = ("shellcheck", "--shell=bash") if shutil.which("shellcheck") else ("bash", "-n")
    read = subprocess.run([*reader, "script"], capture_output=True, text=True)
    assert read.returncode == 0, read.stdout + read.stderr


def conf(folder: RunFolder) -> None:
    """Make the recorded run one of an allocation."""
    config = yaml.safe_load(folder.config.read_text())
    config["launcher"]["kind"] = "allocation"
    folder.config.write_text(yaml.safe_dump(config))


@pytest.mark.parametrize(
    ("signal", "state", "line", "outcome"),
    [
        ("SIGUSR2", "RUNNING", "the time limit of the allocation was near: saved at step 3; ", "failed"),
        ("SIGTERM", "PREEMPTED", "preempted by Slurm: saved at step 3; an allocation is not", "failed"),
        ("SIGINT", "RUNNING", "cancelled by Ctrl-C: saved at step 3; go on with resume=", "cancelled"),
    ],
)  # fmt: skip
def test_nothing_is_requeued(here: Path, signal: str, state: str, line: str, outcome: str) -> None:
    answer(RECORD.replace("RUNNING", state))
    folder = started(here / "runs/a/1")
    conf(folder)
    write_json(folder.stopped, {"signal": signal, "step": 3})
    told = conclude(folder, returncode=1, environment={"SLURM_JOB_ID": "7"}) or ""
    assert told.startswith(line)
    assert "go on with resume=" in told
    assert json.loads(folder.summary.read_text())["outcome"] == outcome


def test_the_step_is_recorded_and_ended_from_other_hosts(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = started(here / "runs/a/1")
    folder.path.chmod(0o700)
    process = {"host": "elsewhere", "pid": 1, "began": "x", "folder": folder.path.stat().st_ino}
    write_json(folder.owner, process)
    owner.hold_by_job(folder, "7", step=own_step("local", start="srun", environment={"SLURM_STEP_ID": "0"}))
    assert json.loads(folder.owner.read_text()) == process  # the step of the shell
    inside = own_step("allocation", start="srun", environment={"SLURM_STEP_ID": "3"})
    owner.hold_by_job(folder, "7", step=inside)
    assert json.loads(folder.owner.read_text()) == process | {"step": "7.3"}

    Path("steps").write_text("StepId=7.0 State=RUNNING\nStepId=7.3 State=RUNNING\n")
    assert main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["state"] == "running"
    assert main(["cancel", str(folder.path), "--yes"]) == 0
    assert Path("cancelled").read_text() == "--ctld --signal=TERM 7.3\n"
    Path("steps").write_text("StepId=7.0 State=RUNNING\n")
    assert main(["cancel", str(folder.path), "--yes"]) != 0
    assert "runs on elsewhere" in capsys.readouterr().err


def test_a_step_is_never_a_whole_job() -> None:
    assert [step_id(text) for text in ("7.3", "7", "7.batch", "7_1.0", "--me", 7.3)] == ["7.3", *[None] * 5]


@pytest.mark.processes
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("words", "hosts"), [((), "n1,n2"), (("sweep.pack=auto",), "n1,n2,n4")])
def test_a_sweep_names_all_hosts_that_it_uses(
    words: tuple[str, ...], hosts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its first run takes one host; srun of this Slurm fails at once."""
    assert run_main(["-m", *SMALL, "device=cpu", "launcher.cpus_per_device=1", "nodes=1,2", *words]) == 1
    line = "sweep of 2 runs; launcher allocation: runs in job 7 (the allocation you are in) on"
    assert f"{line} {hosts}; launcher=slurm" in capsys.readouterr().out


@pytest.mark.usefixtures("here")
def test_a_packed_sweep_gets_places_on_the_hosts_of_the_allocation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of three hosts with 4 CPUs and 2 GPUs each, a run of one GPU has its part, and one of two nodes two."""
    words = ("sweep.pack=auto", "gpus_per_node=1", "launcher.cpus_per_device=2")
    large, one = [prepared(*SMALL, *words, f"nodes={nodes}") for nodes in (2, 1)]
    places, part = pack_runs.AllocationPlaces([large, one]), Room(2, 1, 1000)
    assert places.take(large) == RunPlace({}, ("n1", "n2"), Need(2, part))
    assert places.take(one) == RunPlace({}, ("n1",), Need(1, part))
    line = srun(pack_runs.AllocationPlaces([one]).preview(one))
    assert {"--exact", "--mem=1000M", "--gpus-per-node=1", "--nodes=1"} <= {*line}
    assert "--overlap" not in line
    assert list(pack_runs.find_problems([one, large])) == []
    monkeypatch.setenv("SLURM_STEP_ID", "4294967290")  # the shell of salloc
    assert list(pack_runs.find_problems([one, large])) == []
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setattr("sys.argv", ["run"])
    refused = [*SMALL, *words[:2], "launcher.cpus_per_device=9", "cluster.start=mpirun", "sweep.pack_nodes=1"]
    assert run_main(["-m", *refused, "nodes=1,2"]) == 2
    error = capsys.readouterr().err
    for text in (
        "sweep.pack_nodes = 1 has no effect in an allocation. Try sweep.pack_nodes=null.",
        "this shell is step 0 of its job and keeps the CPUs and GPUs of its node",
        "cluster.start = mpirun can't give a run its place",
        "launcher.cpus_per_device = 9 needs 9 CPUs of a node, and nodes of job 7 (the allocation you are in) "
        "have 4. Try launcher.cpus_per_device=4.",
    ):
        assert text in error
