"""The local launcher with real processes: who is named, how soon all are gone, and that none is left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import read_json
from tests.composed import prepared

pytestmark = pytest.mark.processes
STAND_IN = str(Path(__file__).with_name("stand_in_agent.py"))
VICTIM = 2
RANKS = 4
HOST = os.uname().nodename


def make_folder(path: Path, scenario: str) -> RunFolder:
    folder = RunFolder(path / "run")
    folder.create()
    values = prepared("nodes=2", "gpus_per_node=2", "launcher.snapshot=false").values
    folder.config.write_text(yaml.safe_dump(values))
    (folder.path / "scenario").write_text(scenario)
    return folder


def until(condition: Callable[[], Any], *, within_s: float = 240.0) -> Any:
    """Wait for a true value, and return it."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.02)
    raise TimeoutError(f"not within {within_s} s")


def ranks_of(folder: RunFolder) -> dict[int, int]:
    """The process of each rank, once all of them stand in the scenario."""
    files = [folder.path / f"ready-{rank}" for rank in range(RANKS)]
    until(lambda: all(file.exists() for file in files))
    time.sleep(0.1)  # for the last to enter its collective
    return {rank: int(file.read_text()) for rank, file in enumerate(files)}


def session(leader: int) -> set[int]:
    """The living processes of a session."""
    return {found.pid for found in psutil.process_iter() if _session_of(found) == leader}


def _session_of(process: psutil.Process) -> int | None:
    try:
        alive = process.status() != psutil.STATUS_ZOMBIE
        return os.getsid(process.pid) if alive else None
    except (psutil.NoSuchProcess, ProcessLookupError):
        return None


def naming(folder: RunFolder) -> set[int]:
    """The living processes that have the run folder in their command line."""
    return {
        found.pid
        for found in psutil.process_iter(["cmdline", "status"])
        if str(folder.path) in (found.info["cmdline"] or []) and found.info["status"] != psutil.STATUS_ZOMBIE
    }


class AgentServer:
    """Agents one after another, forked from one process that has torch."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._agent: int | None = None  # the one that runs

    def start(self, folder: RunFolder) -> int:
        """Start an agent, which leads a session of its own; returns its process."""
        if self._process is None:
            root = str(Path(STAND_IN).parents[2])  # of what tests train: tests.models
            environment, pipe = os.environ | {"PYTHONPATH": root}, subprocess.PIPE
            command = [sys.executable, STAND_IN, "--serve"]
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        assert self._process.stdin
        self._process.stdin.write(f"{folder.path}\n")
        self._process.stdin.flush()
        self._agent = self._answer()
        return self._agent

    def exit_code(self) -> int:
        code, self._agent = self._answer(), None
        return code

    def stop(self) -> None:
        """End everything that this server started; the next `start` begins anew."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for process in session(self._agent) if self._agent else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        self._process = self._agent = None

    def _answer(self) -> int:
        """The next number of the server. A test that is ended while it waits takes no other test with it."""
        assert self._process is not None
        assert self._process.stdout
        try:
            return int(self._process.stdout.readline())
        except BaseException:
            self.stop()
            raise


@contextlib.contextmanager
def agent_server() -> Iterator[AgentServer]:
    server = AgentServer()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def agents() -> Iterator[AgentServer]:
    with agent_server() as server:
        yield server


def content(file: Path) -> dict[str, Any]:
    """Of a JSON file that must be there."""
    found = read_json(file)
    assert found is not None
    return found


def start_login(folder: RunFolder, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, STAND_IN, "--login", str(folder.path)], text=True, **options)


def test_complete_run(agents: AgentServer, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "complete")
    agent = agents.start(folder)
    assert agents.exit_code() == 0
    assert session(agent) == set()
    assert not folder.failure.exists()
    assert read_json(folder.summary) == {"outcome": "completed"}


@pytest.mark.timing
@pytest.mark.full
def test_fifty_starts_beside_others(agents: AgentServer, tmp_path: Path) -> None:
    """No port is taken twice, no process is left: each start meets the start of another run."""
    with agent_server() as beside:
        for start in range(50):
            folders = [make_folder(tmp_path / f"{start}-{name}", "complete") for name in ("ours", "theirs")]
            pair = list(zip((agents, beside), folders, strict=True))
            sessions = [server.start(folder) for server, folder in pair]
            assert [server.exit_code() for server, _ in pair] == [0, 0]
            assert [session(leader) for leader in sessions] == [set(), set()]


def test_a_rank_that_raises_is_named_and_its_peers_follow(agents: AgentServer, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "raise")
    agent = agents.start(folder)
    assert agents.exit_code() == 1
    failure = content(folder.failure)
    assert (failure["rank"], failure["host"], failure["node"]) == (VICTIM, HOST, 1)
    assert (failure["kind"], failure["signal"]) == ("error", None)
    assert re.fullmatch(r"ValueError: sample 7 has no label \(\w+\.py:\d+\)", failure["message"])
    assert 'raise ValueError("sample 7\\nhas no label")' in failure["traceback"][-3]
    assert sorted((other["rank"], other["kind"]) for other in failure["followers"]) == [
        (0, "lost_peer"),
        (1, "lost_peer"),
        (3, "lost_peer"),
    ]
    assert failure["line"] == f"rank 2 on {HOST} failed first: {failure['message']}; 3 followers"
    assert session(agent) == set()


def test_what_an_earlier_start_wrote_is_not_the_reason_of_this_one(
    agents: AgentServer, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path, "abort")
    earlier = "terminate called\n  what():  full\nFatal Python error: Aborted\n\nCurrent thread 0x1:\n"
    folder.log(VICTIM, "err").write_text(f'{earlier}  File "/me/net.py", line 3 in forward\n')
    agents.start(folder)
    assert agents.exit_code() == 1
    failure = content(folder.failure)
    assert (failure["rank"], failure["message"]) == (VICTIM, "killed by SIGABRT")


@pytest.mark.timing
@pytest.mark.parametrize("scenario", ["exit", "deaf"])
def test_a_rank_without_a_record_is_named(agents: AgentServer, tmp_path: Path, scenario: str) -> None:
    folder = make_folder(tmp_path, scenario)
    agent = agents.start(folder)
    ranks_of(folder)
    began = time.monotonic()
    assert agents.exit_code() == 1
    assert time.monotonic() - began < 5
    assert session(agent) == set()
    failure = content(folder.failure)
    assert (failure["rank"], failure["kind"]) == (VICTIM, "error")
    assert failure["message"] == "ended with exit code 3 and wrote no reason"
    kind = "stopped" if scenario == "deaf" else "lost_peer"  # the deaf took SIGKILL to end
    assert [other["kind"] for other in failure["followers"]] == [kind] * 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_agent_asked_to_stop_cancels(agents: AgentServer, tmp_path: Path, number: int) -> None:
    folder = make_folder(tmp_path, "block")
    agent = agents.start(folder)
    ranks_of(folder)
    os.kill(agent, number)
    assert agents.exit_code() == 1
    assert session(agent) == set()
    assert not folder.failure.exists()
    summary = content(folder.summary)
    assert (summary["outcome"], summary["world_size"]) == ("cancelled", 4)
    assert summary["layout"]["replicate"] == 4


@pytest.mark.timing
def test_a_killed_agent_takes_its_ranks_along(agents: AgentServer, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "block")
    agent = agents.start(folder)
    ranks_of(folder)
    os.kill(agent, signal.SIGKILL)
    assert agents.exit_code() == -signal.SIGKILL
    until(lambda: not session(agent), within_s=2)


@pytest.mark.timing
def test_a_killed_rank_ends_the_run_and_is_the_last_line(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "block")
    login = start_login(folder, stdout=subprocess.PIPE)
    ranks = ranks_of(folder)
    os.kill(ranks[VICTIM], signal.SIGKILL)
    killed = time.monotonic()
    output, _ = login.communicate(timeout=240)
    assert time.monotonic() - killed < 5
    assert login.returncode == 1
    assert naming(folder) == set()
    failure = content(folder.failure)
    assert (failure["rank"], failure["host"], failure["signal"]) == (VICTIM, HOST, "SIGKILL")
    assert {other["rank"] for other in failure["followers"]} == {0, 1, 3}
    assert output.splitlines()[-1] == f"rank 2 on {HOST} failed first: killed by SIGKILL; 3 followers"
    others = output.replace("starting: importing torch", "")
    assert "torch" not in others.lower()  # elastic's own words stay in the log
    assert content(folder.summary)["outcome"] == "failed"


def login_in_a_terminal(folder: RunFolder) -> tuple[subprocess.Popen[str], int]:
    """The login process as the leader of a terminal's session, and the terminal's other end."""
    keyboard, terminal = pty.openpty()

    def own_terminal() -> None:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGHUP):  # ignored where the tests run in the background
            signal.signal(number, signal.SIG_DFL)
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

    login = start_login(folder, stdin=terminal, stdout=terminal, stderr=terminal, preexec_fn=own_terminal)
    os.close(terminal)
    return login, keyboard


def test_a_closed_terminal_lets_all_ranks_save(tmp_path: Path) -> None:
    """Notes to the dead terminal raised, and the ranks were killed while they saved."""
    folder = make_folder(tmp_path, "save")
    login, keyboard = login_in_a_terminal(folder)
    ranks_of(folder)
    os.close(keyboard)
    assert login.wait(timeout=240) == 1
    assert all((folder.path / f"saved-{rank}").exists() for rank in range(RANKS))
    assert naming(folder) == set()
    assert content(folder.summary)["outcome"] == "cancelled"


def test_ctrl_c_in_a_terminal_leaves_no_process(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "block")
    login, keyboard = login_in_a_terminal(folder)
    shown = bytearray()
    screen = threading.Thread(target=_read_to_the_end, args=(keyboard, shown))
    screen.start()  # a terminal that nobody reads loses what is written to it
    ranks_of(folder)
    os.write(keyboard, b"\x03")
    assert login.wait(timeout=240) == 1
    assert naming(folder) == set()
    assert content(folder.summary)["outcome"] == "cancelled"
    screen.join()
    os.close(keyboard)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())  # without control sequences
    assert "Traceback" not in text
    assert "cancelled by Ctrl-C: step 0 of 5" in text


@pytest.mark.timing
def test_a_killed_login_process_leaves_no_process(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "block")
    login = start_login(folder, stdout=subprocess.DEVNULL)
    ranks = ranks_of(folder)
    assert naming(folder) > {login.pid, *ranks.values()}  # and the agent
    login.kill()
    login.wait()
    until(lambda: not naming(folder), within_s=5)
    assert content(folder.summary)["outcome"] == "cancelled"


def test_an_agent_that_cannot_start_is_shown(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "complete")
    folder.config.write_text("nodes: 1\n")  # not what the launcher writes
    login = start_login(folder, stdout=subprocess.PIPE)
    output, _ = login.communicate(timeout=240)
    assert login.returncode == 1
    failure = content(folder.failure)
    assert (failure["rank"], failure["kind"]) == (None, "start")
    assert output.splitlines()[-1] == (
        "the job failed before any rank started: exit code 1: KeyError: 'strategy'"
    )


def _read_to_the_end(keyboard: int, shown: bytearray) -> None:
    """What the terminal shows, read from its other end until all that wrote there have ended."""
    with contextlib.suppress(OSError):  # EIO: the end
        while part := os.read(keyboard, 4096):
            shown += part
