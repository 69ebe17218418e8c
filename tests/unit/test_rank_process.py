"""A supervisor under Slurm's signals: it outlives them, and tells how its worker ended."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
import yaml

from hpc_parallel.config.command_line import CommandLine
from hpc_parallel.failure import failure, hang_report, rank_process
from hpc_parallel.failure.hang_report import HangReport
from hpc_parallel.launch.checked_run import checked_run
from hpc_parallel.machine.world import World
from hpc_parallel.record.run_folder import RunFolder
from tests.waiting import wait_for

pytestmark = pytest.mark.processes

ENVIRONMENT = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "0",
}  # fmt: skip
SUPERVISOR = """
import os, signal, sys
for number in (signal.SIGTERM, signal.SIGUSR2): signal.signal(number, lambda *_: os._exit(9))  # as submitit
from hpc_parallel.failure import rank_process
rank_process.run(sys.argv[1], worker=(sys.executable, "-c", sys.argv[2]))
"""
# Ready only when it has its own handler: the file holds its process number.
WAITING = """
import os, pathlib, signal, sys, time
def end(number, frame): os._exit(7)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2): signal.signal(number, end)
pathlib.Path(sys.argv[1], "half").write_text(str(os.getpid()))
pathlib.Path(sys.argv[1], "half").rename(pathlib.Path(sys.argv[1], "ready"))
while True: time.sleep(0.1)  # a signal just before a sleep does not interrupt it
"""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run")
    made.create()
    made.config.write_text("cluster: {environment: {OF_THE_SITE: 'yes'}}\n")
    return made


def start(folder: RunFolder, worker: str, **variables: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(folder.path), worker],
        env={**os.environ, **ENVIRONMENT, **variables},
        start_new_session=True,
        stdin=subprocess.PIPE,
    )


def worker_of(folder: RunFolder) -> int:
    ready = folder.path / "ready"
    end = time.monotonic() + 20
    while not ready.exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    return int(ready.read_text())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_death_by_signal_is_recorded(folder: RunFolder, number: signal.Signals) -> None:
    dying = f"import os; os.kill(os.getpid(), {int(number)})"
    assert start(folder, dying).wait(20) == 128 + number
    (found,) = failure.records(folder)
    assert (found.rank, found.node, found.kind, found.signal) == (3, 1, "killed", number.name)
    assert found.host == os.uname().nodename
    assert found.message == f"killed by {number.name}"


@pytest.mark.parametrize(("code", "kinds"), [(0, []), (5, ["error"])])
def test_the_workers_exit_code_is_the_supervisors(folder: RunFolder, code: int, kinds: list[str]) -> None:
    failure.record_death(folder, world=_world(), returncode=-9)  # an earlier attempt's
    assert start(folder, f"raise SystemExit({code})").wait(20) == code
    assert [found.kind for found in failure.records(folder)] == kinds


STOPPED = """
import faulthandler, os, signal, sys
faulthandler.enable(open(sys.argv[1] + "/logs/rank-3.err", "w"))
def in_mid_step(): os.kill(os.getpid(), signal.SIGSTOP)
in_mid_step()
os._exit(0)
"""


def test_a_stopped_worker_is_reported_and_ended(folder: RunFolder) -> None:
    """When it stands still for too long; its peers, who told before, are what the supervisor waits for."""
    folder.config.write_text("cluster: {environment: {}, hang_timeout_s: 0.5}\n")
    attempt = World.discover(ENVIRONMENT).attempt
    for rank in range(3):
        hang_report.write_report(
            folder,
            HangReport(rank=rank, host="n1", world_size=4, attempt=attempt, phase="step", step=8, idle_s=1.0,
                     where="a.py:1 in f", stack=[]),
        )  # fmt: skip
    assert start(folder, STOPPED).wait(20) == 128 + signal.SIGABRT
    (found,) = failure.records(folder)
    assert (found.kind, found.rank) == ("hang", 3)
    assert found.message == "stopped by a signal (state T) at <string>:4 in in_mid_step"
    (told,) = [each for each in hang_report.read_reports(folder, attempt=attempt) if each.rank == 3]
    assert (told.stopped, told.phase) == (True, None)
    assert "line 4 in in_mid_step" in hang_report.stacks(folder, 3).read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR2])
def test_a_signal_to_the_supervisor_is_survived(folder: RunFolder, number: signal.Signals) -> None:
    supervisor = start(folder, WAITING)
    worker = worker_of(folder)
    supervisor.send_signal(number)
    time.sleep(0.2)
    assert supervisor.poll() is None  # it waits for its worker, which got no signal
    os.kill(worker, number)
    assert supervisor.wait(20) == 7


def test_a_signal_to_the_whole_step(folder: RunFolder) -> None:
    """As Slurm sends it: to supervisor and worker at once."""
    supervisor = start(folder, WAITING)
    worker_of(folder)
    os.killpg(supervisor.pid, signal.SIGTERM)
    assert supervisor.wait(20) == 7


STANDING_BY = """
import os, pathlib, sys
from hpc_parallel.failure import standby
pathlib.Path(sys.argv[1], "half").write_text(str(os.getpid()))
pathlib.Path(sys.argv[1], "half").rename(pathlib.Path(sys.argv[1], "ready"))
standby.await_start()
os._exit(5)
"""


@pytest.mark.parametrize(
    ("word", "code", "kinds"), [(b"start\n", 5, ["error"]), (b"end\n", 0, ["killed"]), (b"", 0, ["killed"])]
)
def test_a_rank_that_stands_by_begins_at_a_word(
    folder: RunFolder, word: bytes, code: int, kinds: list[str]
) -> None:
    """Until then it leaves the files of the ranks beside it alone, and it imports when they have begun."""
    failure.record_death(folder, world=_world(), returncode=-9)  # of the rank beside it
    folder.attempts.write_text('{"launched": "2026-11-29T15:00:00+00:00"}\n')
    waiting = start(folder, STANDING_BY, HPC_PARALLEL_STANDBY="yes")
    assert waiting.stdin is not None
    time.sleep(0.5)
    assert not (folder.path / "ready").exists()
    folder.attempts.write_text('{"began": "2026-11-29T15:00:09+00:00"}\n')
    worker = worker_of(folder)
    assert [found.kind for found in failure.records(folder)] == ["killed"]
    waiting.stdin.write(word)
    waiting.stdin.close()
    assert waiting.wait(20) == code
    assert [found.kind for found in failure.records(folder)] == kinds
    wait_for(lambda: not Path(f"/proc/{worker}").exists())


def test_a_worker_that_died_while_it_waited_is_replaced(folder: RunFolder) -> None:
    waiting = start(folder, STANDING_BY, HPC_PARALLEL_STANDBY="yes")
    folder.attempts.write_text('{"began": "2026-11-29T15:00:09+00:00"}\n')
    worker = worker_of(folder)
    os.kill(worker, signal.SIGKILL)
    wait_for(lambda: psutil.Process(worker).status() == psutil.STATUS_ZOMBIE)
    waiting.communicate(b"start\n")
    assert waiting.returncode == 5
    assert [found.kind for found in failure.records(folder)] == ["error"]


def test_scancel_ends_a_rank_that_stands_by(folder: RunFolder) -> None:
    waiting = start(folder, STANDING_BY, HPC_PARALLEL_STANDBY="yes")
    folder.attempts.write_text('{"began": "2026-11-29T15:00:09+00:00"}\n')
    worker_of(folder)
    waiting.send_signal(signal.SIGUSR2)  # before the time limit: submitit's handler would requeue the job
    time.sleep(0.2)
    assert waiting.poll() is None
    waiting.terminate()
    assert waiting.wait(20) == -signal.SIGTERM


def test_the_worker_ends_with_its_supervisor(folder: RunFolder) -> None:
    supervisor = start(folder, WAITING)
    worker = worker_of(folder)
    supervisor.kill()
    supervisor.wait()
    end = time.monotonic() + 5
    while _lives(worker):
        assert time.monotonic() < end
        time.sleep(0.02)


LATE = """
import os, sys
from functools import partial
from hpc_parallel.failure import rank_process
class SignalToItself:
    def __del__(self, send=partial(os.kill, os.getpid(), int(sys.argv[2]))): send()
late = SignalToItself()  # deleted after Python has removed its handlers
rank_process.run(sys.argv[1], worker=("true",))
"""


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
@pytest.mark.parametrize("is_script", [False, True])
def test_a_signal_while_python_exits(
    folder: RunFolder,
    here: Path,
    number: signal.Signals,
    is_script: bool,
) -> None:
    """Slurm would record a completed run as FAILED."""
    words = ["--", "sh", "-c", "echo done"] if is_script else []
    values = checked_run(CommandLine.parse(["launcher=local", "nodes=2", "gpus_per_node=2", *words])).values
    folder.config.write_text(yaml.safe_dump(values))
    command = [sys.executable, "-c", LATE, str(folder.path), str(int(number))]
    done = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert not is_script or folder.log(3, "out").read_text() == "done\n"


@pytest.mark.parametrize(("worker", "code"), [("import os; os.kill(os.getpid(), 9)", 137), ("", 0)])
def test_under_submitit(folder: RunFolder, tmp_path: Path, worker: str, code: int) -> None:
    """srun sees the code, without a traceback, and only a success leaves a result."""
    from submitit.core.utils import DelayedSubmission

    from hpc_parallel.failure import rank_process

    command = (sys.executable, "-c", worker)
    DelayedSubmission(rank_process.run, str(folder.path), worker=command).dump(tmp_path / "1_submitted.pkl")
    submitit = {"SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "1", "SLURM_PROCID": "3"}
    done = subprocess.run(
        [sys.executable, "-m", "submitit.core._submit", str(tmp_path)],
        env={**os.environ, **ENVIRONMENT, **submitit},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    results = [pickle.loads(found.read_bytes()) for found in tmp_path.glob("*_result.pkl")]
    assert results == ([("success", None)] if code == 0 else [])
    assert [found.signal for found in failure.records(folder)] == (["SIGKILL"] if code else [])


def _world() -> World:
    return World.discover({**ENVIRONMENT, "TORCHELASTIC_RESTART_COUNT": "7"})


def _lives(process: int) -> bool:
    """A zombie has ended, though the machine's init may be slow to reap it."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_worker_starts_with_the_sites_variables(folder: RunFolder) -> None:
    """OpenMP reads its own when torch is loaded, so they must be there before."""
    assert start(folder, "import os; assert os.environ['OF_THE_SITE'] == 'yes'").wait() == 0


@pytest.mark.parametrize(("stop_signal", "is_ignored"), [("none", True), ("SIGUSR2", False)])
def test_a_signal_that_a_script_waits_for_is_not_ignored_before_it_has_a_handler(
    stop_signal: str, is_ignored: bool
) -> None:
    """Lightning would set no handler for it."""
    prepare = partial(rank_process.prepare_child, os.getpid(), handles=stop_signal)
    show = "import signal; print(signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN)"
    done = subprocess.run(
        [sys.executable, "-c", show], preexec_fn=prepare, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(is_ignored)
