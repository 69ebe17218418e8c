"""What a script tells its job and asks of it, what is seen of it, and how it is continued by hand."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hpc_parallel.failure.supervisor import watching
from hpc_parallel.job_context import Agreement, has_agreed, request_stop
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.script import script_metrics
from hpc_parallel.script.script_metrics import EventFiles, MetricsWriter
from tests.scripts.test_local_scripts import HERE, ROOT, TWO_NODES, command, ended, only_run, run, started
from tests.waiting import wait_for

GUIDE = Path(ROOT) / "docs/own-script.md"
FILE = re.compile(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", re.DOTALL)
pytestmark = pytest.mark.processes


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path


def metrics_of(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_outside_a_job_it_is_harmless_and_imports_neither_torch_nor_hydra(home: Path) -> None:
    (home / "script.py").write_text("""
import sys
from hpc_parallel import job_context
job_context.log(step=1, loss=2.0)
print(job_context.stop_requested(1), job_context.checkpoint_folder, job_context.restarts)
print({"torch", "hydra", "yaml"} & set(sys.modules))
""")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HPC_PARALLEL")}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=home, env={**environment, "PYTHONPATH": ROOT},
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert done.stdout == "False None None\nset()\n"
    assert sorted(path.name for path in home.iterdir()) == ["script.py"]


def test_figures_and_checkpoints_continue_after_a_resume_by_hand(home: Path) -> None:
    """Also in an allocation that Slurm has requeued, whose starts are not those of the run."""
    (home / "script.py").write_text("""
import os
import sys
from hpc_parallel import job_context
last = job_context.checkpoint_folder / "last.txt"
first = int(last.read_text()) if "--resume" in sys.argv else 1
print("start", job_context.restarts, "at", first)
for step in range(first, first + 4):
    job_context.log(step=step, loss=1 / step, bad=float("nan"))
    mine = last.with_suffix(f".{os.environ['RANK']}")
    mine.write_text(str(3))
    mine.rename(last)  # the other rank may read it now
""")
    words = ("run_dir=run", "script.resume_arguments=--resume {run}/checkpoints/last.txt")
    first = run(home, *TWO_NODES, *words, "--", "script.py", SLURM_RESTART_COUNT="3")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "completed: step 4, loss 0.25" in first.stdout
    again = run(home, "resume=run", SLURM_RESTART_COUNT="3")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "; continues" in again.stdout
    assert (home / "run/logs/rank-1.out").read_text().splitlines() == ["start 0 at 1", "start 1 at 3"]
    lines = metrics_of(home / "run")
    assert [(line["step"], line["loss"], line["bad"]) for line in lines] == [
        (step, 1 / step, None) for step in range(1, 7)
    ]  # the repeated steps are there once
    assert json.loads((home / "run/summary.json").read_text())["restarts"] == 1


@pytest.mark.parametrize("lead", [0, 1, 7])
def test_ranks_that_are_steps_apart_stop_at_the_same_step(home: Path, lead: int) -> None:
    """Rank 0 is `lead` steps ahead at the request; rank 2 asks for the first time only after it."""
    prefix = str(home / "attempt.stop")
    ranks = [Agreement(prefix, rank=rank, ranks=3) for rank in range(3)]
    assert not any(ranks[0].includes(step) for step in range(lead + 1))
    assert not ranks[1].includes(0)
    request_stop(prefix)
    threads = [threading.Thread(target=rank.watch) for rank in ranks]
    for thread in threads[:2]:
        thread.start()
    held: list[bool] = []
    waits = threading.Thread(target=lambda: held.append(ranks[0].includes(lead + 1)))
    while not ranks[0]._holds:
        time.sleep(0.01)
    waits.start()  # it must not answer before all have published
    assert not held
    assert not ranks[2].includes(0)
    threads[2].start()
    for thread in (*threads, waits):
        thread.join(60)
    assert has_agreed(prefix)
    answers = [[rank.includes(step) for step in range(lead + 4)] for rank in ranks]
    assert answers == [[step > lead for step in range(lead + 4)]] * 3
    assert held == [True]


def test_without_all_ranks_no_step_is_agreed_on(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = str(home / "attempt.stop")
    request_stop(prefix)
    alone = Agreement(prefix, rank=0, ranks=2, answer_s=0.1)
    alone.watch()
    assert not alone.includes(10**9)
    assert not has_agreed(prefix)
    assert "not every rank calls stop_requested" in capsys.readouterr().err


def test_a_rank_that_asks_too_late_gets_the_answer_of_those_that_gave_up(home: Path) -> None:
    prefix = str(home / "attempt.stop")
    request_stop(prefix)
    gave_up, late = Agreement(prefix, rank=1, ranks=2, answer_s=0.1), Agreement(prefix, rank=0, ranks=2)
    gave_up.watch()
    late.watch()  # all have published now, and rank 0 would decide
    assert [rank.includes(10**9) for rank in (gave_up, late)] == [False, False]
    assert not has_agreed(prefix)


def test_a_pipe_in_place_of_an_answer_holds_nobody(home: Path) -> None:
    prefix = str(home / "attempt.stop")
    request_stop(prefix)
    os.mkfifo(f"{prefix}-at")
    Agreement(prefix, rank=0, ranks=1).watch()
    assert not has_agreed(prefix)


def test_the_guides_script_stops_at_one_step_on_all_ranks_and_goes_on(home: Path) -> None:
    script = dict(FILE.findall(GUIDE.read_text()))["counts.py"]
    assert "    time.sleep(0.1)" in script
    # Only the first start is to last until it is signalled.
    (home / "counts.py").write_text(script.replace("sleep(0.1)", "sleep(0 if job_context.restarts else 0.1)"))
    process = started(home, *TWO_NODES, "run_dir=run", "--", "counts.py")
    wait_for((home / "run/metrics.jsonl").exists)
    process.send_signal(signal.SIGTERM)
    assert process.wait(240) == 1
    assert json.loads((home / "run/summary.json").read_text())["outcome"] == "cancelled"
    step = int((home / "run/checkpoints/step.txt").read_text())
    stops = [os.readlink(path) for path in (home / "run/rendezvous").glob("*.stop-at")]
    assert stops == [str(step)]
    assert [line["step"] for line in metrics_of(home / "run")] == [*range(1, step + 1)]
    done = run(home, "resume=run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line["step"] for line in metrics_of(home / "run")] == [*range(1, 101)]


def test_event_files_of_tensorboard_become_metrics(home: Path) -> None:
    pytest.importorskip("tensorboard")
    (home / "script.py").write_text("""
import pathlib, sys
# The classes of which torch's SummaryWriter is made.
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.summary.writer.event_file_writer import EventFileWriter
writer = EventFileWriter(sys.argv[1])
for step in range(1, 4):
    values = [Summary.Value(tag=tag, simple_value=value)
              for tag, value in {"train/loss": 1 / step, "lr": 0.5, "bad": float("nan")}.items()]
    values.append(Summary.Value(tag="note", tensor=TensorProto(dtype=7, string_val=[b"no figure"])))
    writer.add_event(Event(step=step, wall_time=1.7e9, summary=Summary(value=values)))
writer.close()
pathlib.Path(sys.argv[1], "events.out.tfevents.0.damaged").write_bytes(b"\\xff" * 5000)
""")
    done = run(home, *HERE, "--", "script.py", "{run}/board")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "completed: step 3, loss 0.3333" in done.stdout
    lines = metrics_of(only_run(home))
    assert [(line["step"], line["lr"], line["bad"]) for line in lines] == [
        (step, 0.5, None) for step in (1, 2, 3)
    ]
    assert all("note" not in line for line in lines)
    assert [line["loss"] for line in lines] == pytest.approx([1, 1 / 2, 1 / 3])
    assert all(line["loss"] == line["train/loss"] for line in lines)
    (row,) = json.loads(command(home, "status", "--json"))
    assert (row["state"], row["step"]) == ("completed", 3)


def test_an_event_file_that_can_not_be_read_is_announced(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = EventFiles(home)
    (home / "events.out.tfevents.1").write_bytes(b"")
    (home / "a link.tfevents").symlink_to("/dev/zero")
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_file_loader", None)
    assert list(files.read(is_last=True)) == list(files.read(is_last=True)) == []
    told = capsys.readouterr().err
    assert told.count("is not read into metrics.jsonl: install tensorboard beside hpc_parallel") == 1


def test_files_of_earlier_starts_leave_room_for_new_ones_and_too_many_are_announced(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(script_metrics, "_loader", lambda path: opened.append(path.name) or (lambda: ()))
    for number in range(100):
        (home / f"a{number}.tfevents").touch()
    files = EventFiles(home)
    for number in range(66):
        (home / f"b{number:02}\x1b.tfevents").touch()
    for _ in range(2):
        assert list(files.read(is_last=True)) == []
    assert opened == [f"b{number:02}\x1b.tfevents" for number in range(64)]
    told = capsys.readouterr().err
    assert told.count("is not read into metrics.jsonl: 64 others are") == 2
    assert "\x1b" not in told


def test_a_restart_drops_only_the_steps_that_it_repeats(home: Path) -> None:
    folder = RunFolder(home / "run")
    folder.create()
    folder.metrics.write_text("".join(f'{{"step": {step}, "old": 1}}\n' for step in range(1, 6)))
    writer = MetricsWriter(folder, pattern=None)
    with (home / "run/logs/rank-0.metrics.jsonl").open("w") as log:  # step 0: of hyperparameters
        log.write(
            '{"step": 0, "x": 1}\n{"step": 4, "loss": 2}\n{"step": "5"}\n{"step": 5, "loss": "a"}\n[]\n'
        )
    writer(True)
    assert [(line["step"], line.get("old")) for line in metrics_of(home / "run")] == [
        (1, 1), (2, 1), (3, 1), (0, None), (4, None), (5, None),
    ]  # fmt: skip
    assert "loss" not in metrics_of(home / "run")[-1]


# It serves NCCL's pipe as torch does. Both ranks stand at a line of the script: rank 0 as in `loss.item()`.
HANGS_ON_GPUS = """
import os, pickle, threading, time
rank = os.environ["RANK"]
path = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + rank + ".pipe"
os.unlink(path)
os.mkfifo(path)
pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
entries = [{"profiling_name": "nccl:all_reduce", "process_group": ("0", "default_pg"), "is_p2p": False,
            "collective_seq_id": number, "state": "started" if number == 15 else "completed",
            "retired": number < 15} for number in range(1, 16 - int(rank))]
dump = {"pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}, "entries": entries}
def serve():
    while not os.read(pipe, 128): time.sleep(0.05)
    with open(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + rank, "wb") as file: pickle.dump(dump, file, 2)
threading.Thread(target=serve, daemon=True).start()
def item(): time.sleep(600)
def load(): time.sleep(600)
print("step 1", flush=True)
load() if rank == "1" else item()
"""


def test_nccl_names_the_rank_that_is_behind_and_all_stacks_are_kept(home: Path) -> None:
    (home / "script.py").write_text(HANGS_ON_GPUS)
    words = ("cluster.hang_timeout_s=3", "launcher.max_restarts=0", "--", "script.py")
    done = run(home, *TWO_NODES, *words)
    assert done.returncode == 1
    outcome, line = ended(home)
    assert outcome == "failed"
    pattern = (
        r"rank 1 on \S+ failed first: hangs at \S+/script.py:17 in load; the GPU of rank 0 waits in "
        r"all_reduce 15 of default_pg, which it has not queued; no rank has written anything for 3 s; "
        r"1 follower"
    )
    assert re.fullmatch(pattern, line or ""), line
    stacks = [(only_run(home) / f"logs/rank-{rank}.stacks").read_text() for rank in (0, 1)]
    assert "in item" in stacks[0]
    assert "in load" in stacks[1]
    assert json.loads((only_run(home) / "failure.json").read_text())["kind"] == "hang"


@pytest.mark.full
def test_the_processes_of_each_rank_are_measured(home: Path) -> None:
    (home / "script.py").write_text("""
import subprocess, sys, time
data = bytearray(200 * 2**20)
subprocess.run([sys.executable, "-c", "sum(range(10**7))"], check=True)
time.sleep(2)  # a sample is taken after a second
while time.process_time() < 1: pass
""")
    began = time.monotonic()
    done = run(home, *TWO_NODES, "--", "script.py")
    took_s = time.monotonic() - began
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in (0, 1):
        figures = json.loads((only_run(home) / f"logs/rank-{rank}.device.json").read_text())
        assert figures["rank"] == rank
        assert 1 / took_s < figures["cpu_cores"] < (os.cpu_count() or 1)
        assert 200 * 2**20 < figures["resident_bytes"] < 300 * 2**20
    shown = command(home, "show", str(only_run(home)))
    assert re.search(r"^CPU +median \d\.\d cores", shown, re.MULTILINE)
    assert re.search(r"^resident memory +median 0\.2 GiB", shown, re.MULTILINE)


def test_a_check_that_fails_does_not_stop_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    calls = []

    def breaks(is_last: bool) -> None:
        raise OSError("no space")

    with watching([breaks, calls.append]):
        pass
    assert calls == [True]
    assert "no space" in capsys.readouterr().err
