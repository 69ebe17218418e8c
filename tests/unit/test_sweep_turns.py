"""Who may start the runs of a sweep: one command at a time; on this machine each in its turn, unless it is
cancelled before."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from hpc_parallel.__main__ import main as command
from hpc_parallel.failure.end_runs import Target, end_runs
from hpc_parallel.failure.run_state import states
from hpc_parallel.launch import local_launcher
from hpc_parallel.launch.resume import value_of
from hpc_parallel.record import owner
from hpc_parallel.record.recorded import read_run
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.record.sweep_folder import read_sweep
from hpc_parallel.run import main
from hpc_parallel.sweep.earlier import resume_command
from tests.recorded_runs import prepared

pytestmark = pytest.mark.processes

# Plays the local agent: it owns the run, is asked to end, says so.
AGENT = """
import json, os, signal, sys, time
from pathlib import Path
from hpc_parallel.launch import local_launcher
from hpc_parallel.record import owner
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.failure.conclude_run import conclude
folder = RunFolder(Path(sys.argv[1]))
def leave(number, frame):
    conclude(folder, returncode=-number, cancelled=True, environment={})
    os._exit(1)
for number in (signal.SIGINT, signal.SIGTERM):  # a script in the background has SIGINT ignored
    signal.signal(number, leave)
folder.begin_anew()
time.sleep(0.3)  # Python's start, before the run has a process of its own
owner.take(folder)
(folder.path / "began").touch()
time.sleep(60)
"""
WORDS = ("-m", "seed=1,2,3,4,5", "launcher=local", "launcher.snapshot=false")
TWO = ("sweep.parallelism=2",)
PACKED = ("sweep.pack=auto", "device=cpu")  # as many as there are cores: two


@pytest.fixture(autouse=True)
def here(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    monkeypatch.setattr(
        local_launcher, "_command", lambda folder, agent: [sys.executable, "-c", AGENT, str(folder.path)]
    )
    return here


def meanwhile(act: Callable[[Path], None], *, limit: tuple[str, ...] = TWO) -> tuple[int, Path]:
    """The exit code of a local sweep of five runs, two at once, in which `act` is done once two have begun,
    and its folder. Whatever goes wrong, it ends."""
    wrong: list[BaseException] = []

    def watch() -> None:
        try:
            deadline = time.monotonic() + 240
            while len(list(Path().glob("runs/*/*/began"))) < 2:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            (folder,) = Path().glob("runs/sweeps/*")
            act(folder.absolute())
        except BaseException as error:
            wrong.append(error)
            os.kill(os.getpid(), signal.SIGTERM)

    watcher = threading.Thread(target=watch)
    watcher.start()
    code = main([*WORDS, *limit])
    watcher.join()
    if wrong:
        raise wrong[0]
    (folder,) = Path().glob("runs/sweeps/*")
    return code, folder.absolute()


def cancel(*words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hpc_parallel", "cancel", *words, "--yes"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def rows(sweep: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert command(["status", str(sweep), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_cancelled_sweep_begins_nothing_more(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, sweep = meanwhile(lambda folder: cancel(str(folder)))
    assert code == 1
    assert capsys.readouterr().out.count("cancelled before its turn") == 3
    began = [(run.run_dir / "began").exists() for run in read_sweep(sweep).runs]
    assert began == [True, True, False, False, False]
    assert [(row["state"], row["ended"]) for row in rows(sweep, capsys)] == [("cancelled", True)] * 5
    assert not (sweep / "owner.json").exists()


def test_a_run_that_waits_is_cancelled_alone(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner is the process of the whole sweep, which has to go on."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    seen: dict[str, Any] = {}

    def act(folder: Path) -> None:
        runs = [run.run_dir for run in read_sweep(folder).runs]
        listed = subprocess.run(
            [sys.executable, "-m", "hpc_parallel", "status", str(folder), "--json"], capture_output=True
        )
        seen["rows"] = json.loads(listed.stdout)
        cancel(str(runs[2]))
        cancel(str(runs[0]))  # then the fourth begins
        deadline = time.monotonic() + 240
        while not (runs[3] / "began").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        seen["third"] = (runs[2] / "began").exists()
        cancel(str(folder))

    code, sweep = meanwhile(act, limit=PACKED)
    assert [row["state"] for row in seen["rows"][2:]] == ["pending"] * 3
    assert (code, seen["third"]) == (1, False)
    began = [(run.run_dir / "began").exists() for run in read_sweep(sweep).runs]
    assert began == [True, True, False, True, False]
    assert [row["state"] for row in rows(sweep, capsys)] == ["cancelled"] * 5


@pytest.mark.parametrize("withdrawn", [True, False])
def test_a_process_that_ended_meanwhile_is_not_signalled(withdrawn: bool, here: Path) -> None:
    """Between the question and the yes another cancelled it, or its sweep ended and took its folder away."""
    folder = prepared(here / "runs/a/1")
    owner.queue(folder)
    run = read_run(folder.path)
    target = Target(run, *states([run]))
    if withdrawn:
        assert owner.withdraw(folder)
    else:
        shutil.rmtree(folder.path)
    assert end_runs([target], warn=print) == {}


def test_after_a_signal_unstarted_runs_are_reported(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, sweep = meanwhile(lambda folder: os.kill(os.getpid(), signal.SIGTERM))
    assert code == 1
    assert [row["state"] for row in rows(sweep, capsys)] == ["cancelled"] * 2 + ["not started"] * 3
    assert command(["status", str(sweep)]) == 0
    lines = capsys.readouterr().out.splitlines()[-3:]
    assert lines == [f"not started, or its folder is gone: seed={seed}" for seed in (3, 4, 5)]


def test_of_two_that_go_on_with_a_sweep_one_must_refuse(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["-m", "seed=1,2", "launcher=script", "launcher.snapshot=false", "cluster=cpu"]
    assert main(words) == 0
    (sweep,) = here.glob("runs/sweeps/*")
    before = sorted(here.rglob("*"))
    again = ["-m", f"sweep.resume={sweep}"]
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        began = owner._began(other.pid)
        write_json(sweep / "owner.json", {**asdict(owner.this_process()), "pid": other.pid, "began": began})
        capsys.readouterr()
        assert main(again) == 2
        assert f"{sweep} is going on already, as process {other.pid}.\n" in capsys.readouterr().err
        write_json(sweep / "owner.json", {"host": "elsewhere", "pid": 1, "began": "x"})
        assert main(again) == 2
        said = capsys.readouterr().err
        assert f"as process 1 on elsewhere. If that process is gone: rm {sweep}/owner.json." in said
        assert sorted(path for path in here.rglob("*") if path.name != "owner.json") == [
            path for path in before if path.name != "owner.json"
        ]
        write_json(sweep / "owner.json", {**asdict(owner.this_process()), "pid": other.pid, "began": began})
    finally:
        other.kill()
        other.wait()
    assert main(again) == 0  # who held it is gone
    assert not (sweep / "owner.json").exists()


def test_only_the_holder_releases_a_sweep(here: Path) -> None:
    folder = RunFolder(here)
    owner.claim(folder)
    write_json(folder.owner, {"host": "elsewhere", "pid": 1, "began": "x"})
    owner.release(folder)
    assert folder.owner.exists()


@pytest.mark.parametrize(
    ("place", "typed"),
    [("runs/sweeps/20261130-0321", "sweep.resume=runs/sweeps/20261130-0321"),
     ("a b/1", "'sweep.resume=a b/1'"), ("mine", "sweep.resume=mine"), ("1_0", "\"sweep.resume='1_0'\"")],
)  # fmt: skip
def test_the_command_that_resumes_a_sweep_names_it(place: str, typed: str) -> None:
    command_line = resume_command(Path(place).absolute())
    assert shlex.split(command_line) == ["python", "-m", "hpc_parallel.run", "-m", *shlex.split(typed)]
    assert value_of(shlex.split(command_line)[-1]) == place
    assert ("'" in command_line) == ("'" in typed)


@pytest.mark.parametrize("word", ["sweep.resume=/a/(b", "resume=/a/(b"])
def test_unreadable_overrides_are_reported(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", word] if word.startswith("sweep") else [word]) == 2
    key = word.partition("=")[0]
    said = f"{key} = '/a/(b' can't be read: quote special characters of the value, and again for the shell."
    assert f"""{said} Try "{key}='/a/(b'".""" in capsys.readouterr().err
