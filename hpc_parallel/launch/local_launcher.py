"""The local launcher: starts the run's agent (failure/local_agent.py), follows it, and ends with it."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import FrameType, MappingProxyType

from hpc_parallel.failure.failure import signal_name
from hpc_parallel.launch.prepare import PreparedRun
from hpc_parallel.launch.run_files import undo_write, write
from hpc_parallel.record import host_memory, owner
from hpc_parallel.record.endings import Summary
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import open_append
from hpc_parallel.shell import complain
from hpc_parallel.slurm.node_room import RunPlace

AGENT = ("-m", "hpc_parallel.job", "agent")
PERIOD_S = 0.1
_SAME_SIGNAL_S = 0.3  # the sender often signals both the process and its group
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class LocalLauncher:
    """Runs every rank as a process on this machine; nodes are simulated."""

    def preview(self, run: PreparedRun) -> str:
        count = f"{run.processes} process{'es' * (run.processes > 1)}"
        return f"{count} on this machine, by {' '.join(_command(run.folder, AGENT))}"

    def agent(self, run: PreparedRun, *, place: RunPlace | None = None) -> Agent:
        """Start the ranks of a run whose folder is written."""
        return local_agent(run.folder, variables={**run.variables, **(place or RunPlace()).variables})

    def start(self, run: PreparedRun) -> threading.Thread:
        write(run)
        try:
            return watched_agent(run.folder, start=partial(self.agent, run))
        except BaseException:
            undo_write(run)
            raise

    def launch(self, run: PreparedRun) -> int:
        """Raises KeyboardInterrupt after a cancelled run has ended, because a sweep must not continue."""
        write(run)
        start = partial(self.agent, run)
        code = follow_agent(run.folder, start=start, steps=run.steps, is_script=run.is_script)
        summary = Summary.read(run.folder)
        if summary is not None and summary.outcome == "cancelled":
            raise KeyboardInterrupt
        return code


def follow_agent(
    folder: RunFolder, *, start: Callable[[], Agent], steps: int, is_script: bool = False
) -> int:
    """Start the agent, show the run until it ends, and return the exit code: 0 if it completed.

    is_script: passed to `RunFollower`.

    At the first Ctrl-C, or if the terminal is closed, the agent lets the ranks save, then ends them.
    The second Ctrl-C kills all processes at once. If this process dies, the agent and the ranks end too.
    """
    with counting_signals() as signals:
        process = start()
        try:
            from hpc_parallel.launch.follow import RunFollower  # rich loads while the agent loads torch

            follower = RunFollower(folder, steps=steps, is_script=is_script)
            note, forwarded, is_shown = "starting", 0, True
            while not process.has_ended():
                if len(signals) > forwarded:
                    process.stop(signals)
                    note, forwarded = "stopping; Ctrl-C again kills at once", len(signals)
                try:
                    follower.note(note)
                    follower.poll()
                except OSError:  # the terminal was closed: the ranks save, and nobody sees it
                    if is_shown and not signals:
                        signals.append(signal.SIGHUP)
                    is_shown = False
                time.sleep(PERIOD_S)
        finally:
            process.end(signals=signals)
    return follower.finish(signals) if is_shown else 1


def watched_agent(folder: RunFolder, *, start: Callable[[], Agent]) -> threading.Thread:
    """Start the agent; returns the thread that waits for it and makes sure that its end is recorded.

    The agent ends when this process ends. The returned thread starts the agent, because Linux ends the agent
    with the thread that started it (PR_SET_PDEATHSIG, prctl(2)) and the caller's thread may end before the
    run. No signal handler is set, so this function works in any thread.
    """
    started: Future[None] = Future()

    def watch() -> None:
        try:
            agent = start()
            try:
                # `cancel` ends the owner of a run. It must not end this process, which may be a notebook.
                owner.hand_to_process(folder, agent.pid)
            except BaseException:
                agent.end(signals=[signal.SIGTERM])
                raise
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        with contextlib.suppress(ChildProcessError):  # other code in this process has reaped it
            while not agent.has_ended():
                time.sleep(PERIOD_S)
        agent.end()

    thread = threading.Thread(target=watch, name=f"run {folder.path.name}", daemon=True)
    thread.start()
    started.result()
    return thread


def local_agent(
    folder: RunFolder, *, variables: Mapping[str, str] = MappingProxyType({}), agent: Sequence[str] = AGENT
) -> Agent:
    """Start the agent of a run on this machine (`failure/local_agent.py`).

    variables: additional environment variables of the run's processes.
    """
    command = [*_command(folder, agent), "--parent", str(os.getpid())]
    environment = {**os.environ, **variables}
    return Agent(folder, command=command, log=folder.logs / "agent.err", environment=environment)


class Agent:
    """The process that runs a run's ranks, from start to exit."""

    def __init__(
        self,
        folder: RunFolder,
        *,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        prepare: Callable[[], None] | None = None,
    ) -> None:
        """log: a file for the output of the command; prepare: is called in the process before the command."""
        self._folder = folder
        self._log = log
        self._copies = host_memory.name_of(folder, environment)  # now: later the run folder may be gone
        with os.fdopen(open_append(log), "ab") as output:
            # In a new session the agent does not receive the terminal's Ctrl-C; only this process does.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment,
                start_new_session=True, preexec_fn=prepare,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    def has_ended(self) -> bool:
        """Check without reaping, so that the kernel can't reuse the process group's number yet."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def stop(self, signals: list[int]) -> None:
        """Let the agent save and end after the first of the received `signals`; kill it after the second."""
        if len(signals) == 1:
            self._process.send_signal(signals[0])
            return
        from hpc_parallel.failure.process_tree import kill_tree

        kill_tree(self.pid)
        os.killpg(self.pid, signal.SIGKILL)  # also processes whose parent has ended

    def end(self, *, signals: Sequence[int] = ()) -> None:
        """Kill all remaining processes, and make sure that the run folder records how the run ended.

        signals: the signals that asked the agent to end.
        """
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        returncode = self._process.wait()
        host_memory.remove(self._copies)  # if the agent was killed
        if returncode == 0 or self._folder.summary.exists():
            return
        command = [sys.executable, "-m", "hpc_parallel.job", "conclude", str(self._folder.path)]
        cancelled = ["--cancelled", "--by", signal_name(signals[0])] if signals else []
        command += [str(returncode), "--log", str(self._log), *cancelled]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
        if done.stderr and not self._folder.summary.exists():  # the disk is full
            complain([f"how the run ended could not be recorded: {done.stderr.splitlines()[-1]}"])


def _command(folder: RunFolder, agent: Sequence[str]) -> list[str]:
    return [sys.executable, *agent, str(folder.path)]


@contextlib.contextmanager
def counting_signals() -> Iterator[list[int]]:
    """Collect the signals that would end this process, instead of ending it."""
    signals: list[int] = []
    last_s = -math.inf

    def collect(number: int, frame: FrameType | None) -> None:
        nonlocal last_s
        if time.monotonic() - last_s > _SAME_SIGNAL_S:
            signals.append(number)
        last_s = time.monotonic()

    # Ignored signals stay ignored: SIGHUP under nohup, SIGINT in a script's background job.
    handled = [number for number in _STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, collect) for number in handled}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
