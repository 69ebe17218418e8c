"""A local run on a full disk ends, and says why its end is not recorded."""

import subprocess
import sys
from pathlib import Path

import pytest

from hpc_parallel.launch.local_launcher import Agent
from hpc_parallel.record.run_folder import RunFolder

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
