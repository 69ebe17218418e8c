"""A local run on a full disk ends, and says why its end is not recorded; it leaves nothing in memory."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpc_parallel.launch.local_launcher import Agent
from hpc_parallel.launch.run_files import write
from hpc_parallel.record import host_memory
from hpc_parallel.record.endings import Failure
from hpc_parallel.record.run_folder import RunFolder
from tests.composed import prepared

_AGENT = """
import threading
from hpc_parallel.failure.local_agent import main
threading.Thread(target=threading.Event().wait).start()  # as torch's threads, which never end
main(["/nowhere"], load_entry=lambda: None)
"""


@pytest.mark.processes
def test_an_agent_ends_whose_output_cannot_be_written() -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", _AGENT], stdout=full, stderr=full, start_new_session=True, timeout=60
        )
    assert ended.returncode == 1


@pytest.mark.processes
def test_why_the_end_of_a_run_is_not_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Here its configuration is gone."""
    folder = RunFolder(tmp_path / "run")
    folder.create()
    failing = [sys.executable, "-c", "raise SystemExit(1)"]
    Agent(folder, command=failing, log=folder.logs / "agent.err", environment={}).end()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("how the run ended could not be recorded: FileNotFoundError")
    assert "config.yaml" in line


_HARMED = """
import os, shutil, signal, sys
from pathlib import Path
from hpc_parallel.failure.local_agent import main
from hpc_parallel.record import host_memory
host_memory.ROOT, harm = Path(sys.argv[2]), sys.argv[3]
def load_entry():
    if harm == "removed":
        shutil.rmtree(sys.argv[1])
    os.kill(os.getpid(), signal.SIGTERM if harm == "cancelled" else signal.SIGKILL if harm == "killed" else 0)
    raise ValueError("planted")
main([sys.argv[1]], load_entry=load_entry)
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("harm", "line"),
    [
        ("failed", "the job failed before any rank started: exit code 1: ValueError: planted"),
        ("cancelled", None),
        ("removed", None),  # the run folder: the end can't be recorded
        (
            "killed",
            "the job failed before any rank started: the process that starts the ranks was killed by SIGKILL",
        ),
    ],
)
def test_an_end_before_any_rank_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str, line: str | None
) -> None:
    """An earlier start has left a copy in memory, and a line in the log."""
    if harm == "killed":  # then nothing of the agent is left that could remove the copies
        monkeypatch.setattr(host_memory, "ROOT", tmp_path)
    run = prepared("launcher=local", "device=cpu", f"run_dir={tmp_path / 'run'}")
    write(run)
    copies = tmp_path / host_memory.name_of(run.folder, os.environ)
    copies.mkdir()
    log = run.folder.logs / "agent.err"
    log.write_text("an earlier start failed\n")
    command = [sys.executable, "-c", _HARMED, str(run.folder.path), str(tmp_path), harm]
    agent = Agent(run.folder, command=command, log=log, environment=dict(os.environ))
    while not agent.has_ended():
        time.sleep(0.05)
    agent.end()
    ended = Failure.read(run.folder)
    assert (ended and ended.line) == line
    assert not copies.exists()
