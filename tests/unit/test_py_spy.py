"""The stacks of a script that hangs: by py-spy where it is installed, else by faulthandler."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_parallel.failure.stacks import NATIVE, spot_of, stack_of
from hpc_parallel.failure.supervisor import state_of
from hpc_parallel.machine.world import World
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.script import script_failure
from hpc_parallel.script.script_failure import ScriptSupervisor

pytestmark = pytest.mark.processes
# As py-spy 0.4.3 prints it, without keys that are not read; {pid} is filled in.
ANSWER = """[
  {"pid": {pid}, "thread_id": 2, "thread_name": "MainThread", "os_thread_id": {pid}, "frames": [
    {"name": "clock_nanosleep", "filename": "/usr/lib/libc.so.6", "module": "/usr/lib/libc.so.6", "line": 0},
    {"name": "load", "filename": "/home/me/train.py", "line": 7},
    {"name": "<module>", "filename": "/home/me/train.py", "line": 9}]},
  {"pid": {pid}, "thread_id": 1, "thread_name": "reader", "os_thread_id": 1, "frames": [
    {"name": "Thread.run", "filename": "/usr/lib/python3.11/threading.py", "line": 982}]}
]"""
SPIED = """Thread reader (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 982 in Thread.run

Thread MainThread (most recent call first):
  Binary file "/usr/lib/libc.so.6", at clock_nanosleep
  File "/home/me/train.py", line 7 in load
  File "/home/me/train.py", line 9 in <module>
"""
# It says that it is ready on the line that sleeps: a stop may come at once.
SCRIPT = "import time\n\ndef load():\n    time.sleep(print('ready', flush=True) or 600)\nload()\n"


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[tuple[ScriptSupervisor, subprocess.Popen[str]]]:
    """A script that sleeps, and its supervisor."""
    (tmp_path / "train.py").write_text(SCRIPT)
    folder = RunFolder(tmp_path / "run")
    folder.create()
    with folder.log(0, "err").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "train.py"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=log, text=True,
            env={**os.environ, "PYTHONFAULTHANDLER": "1"},
        )  # fmt: skip
    assert process.stdout.readline() == "ready\n"
    world = World.discover({})  # one rank
    supervisor = ScriptSupervisor(folder, world=world, process=process.pid, timeout_s=1, environment={})
    yield supervisor, process
    process.kill()
    process.wait()
    process.stdout.close()


def stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGSTOP)
    while state_of(process.pid) != "T":
        time.sleep(0.01)


def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, answer: str, ends: int = 0) -> Path:
    """A stand-in for py-spy, which notes its words."""
    program = tmp_path / "bin" / "py-spy"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho $* > {tmp_path}/words\ncat <<'E'\n{answer}\nE\nexit {ends}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    return tmp_path / "words"


def test_py_spy_is_asked_and_the_rank_is_ended(
    hung: tuple[ScriptSupervisor, subprocess.Popen[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads frames of C code of a process that runs, so before the stop."""
    supervisor, process = hung
    words = install(tmp_path, monkeypatch, answer=ANSWER.replace("{pid}", str(process.pid)))
    supervisor.on_alarm()
    assert words.read_text() == f"dump --pid {process.pid} --native --json\n"
    text = supervisor.stacks()
    assert text == SPIED
    assert spot_of(stack_of(text)) == "me/train.py:7 in load"
    assert stack_of(text)[-1] == '  Binary file "/usr/lib/libc.so.6", at clock_nanosleep'
    assert process.wait(timeout=60) == -signal.SIGABRT


def test_a_process_that_was_stopped_before_is_read_without_a_pause(
    hung: tuple[ScriptSupervisor, subprocess.Popen[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor, process = hung
    stop(process)
    words = install(tmp_path, monkeypatch, answer=ANSWER.replace("{pid}", str(process.pid)))
    supervisor.on_alarm()
    assert not words.exists()
    assert supervisor.stacks() == SPIED
    assert words.read_text() == f"dump --pid {process.pid} --nonblocking --json\n"
    assert process.wait(timeout=60) == -signal.SIGABRT


@pytest.mark.parametrize("answer", ["Error: Permission Denied", "[]", "{}", '[{"pid": 1}]', "[1]", None])
def test_faulthandler_takes_its_place(
    hung: tuple[ScriptSupervisor, subprocess.Popen[str]],
    answer: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    supervisor, process = hung
    if answer is None:  # not installed
        monkeypatch.setattr(script_failure.shutil, "which", lambda *given, **more: None)
    else:
        install(tmp_path, monkeypatch, answer=answer, ends=1)
    supervisor.on_alarm()
    text = supervisor.stacks()
    assert text.startswith("Fatal Python error: Aborted")
    assert spot_of(stack_of(text)).endswith("/train.py:4 in load")
    assert process.wait(timeout=60) == -signal.SIGABRT


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.skipif(script_failure.find_py_spy() is None, reason="py-spy is not installed")
def test_the_real_py_spy_reads_a_script_without_faulthandler(
    hung: tuple[ScriptSupervisor, subprocess.Popen[str]], native: bool
) -> None:
    _, process = hung
    if not native:
        stop(process)
    text = script_failure.spied_stacks(process.pid, native=native)
    if text is None:
        pytest.skip("this system does not let py-spy read another process (ptrace_scope)")
    assert spot_of(stack_of(text)).endswith("/train.py:4 in load")
    python = [line for line in stack_of(text) if not line.startswith(NATIVE)]
    assert python[0].endswith(", line 5 in <module>")
    assert ("nanosleep" in stack_of(text)[-2] + stack_of(text)[-1]) == native
    assert (state_of(process.pid) == "T") != native
