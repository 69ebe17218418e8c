"""Commands, processes and network namespaces of this machine, from which a cluster is built."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# The complete environment of the daemons: no variable of the caller may reach a job through slurmd.
SYSTEM = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}


class ClusterError(RuntimeError):
    """The cluster can't do what was requested; the message ends with lines of its logs."""


@dataclass(frozen=True)
class Process:
    """A process, identified by its id and start time, because ids are reused."""

    pid: int
    start_ticks: int

    @classmethod
    def current(cls) -> Process:
        return cls(os.getpid(), _state_and_start(os.getpid())[1])

    def alive(self) -> bool:
        with suppress(OSError):
            state, start_ticks = _state_and_start(self.pid)
            return start_ticks == self.start_ticks and state not in "ZX"
        return False


def _state_and_start(pid: int) -> tuple[str, int]:
    """Fields 3 and 22 of /proc/PID/stat; field 2, a name in parentheses, may contain blanks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])


def _inside(pid: int, namespace: Path) -> bool:
    with suppress(OSError):  # the process may end meanwhile
        return namespace.samefile(f"/proc/{pid}/ns/net")
    return False


def pids(namespace: Path) -> list[int]:
    """The processes in a network namespace; `namespace` is the file on which it is mounted."""
    running = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in running if _inside(pid, namespace)]


def empty(namespace: Path) -> None:
    """Kill every process in a namespace, and every process that they start meanwhile."""

    def emptied() -> bool:
        for pid in pids(namespace):
            with suppress(ProcessLookupError):
                handle = os.pidfd_open(pid)
                try:
                    if _inside(pid, namespace):  # checked again: another process may have the id now
                        signal.pidfd_send_signal(handle, signal.SIGKILL)
                finally:
                    os.close(handle)
        return not pids(namespace)

    wait(emptied, what=f"every process in {namespace} has ended")


def wait(condition: Callable[[], bool], *, what: str, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise ClusterError(f"Waited {timeout_s:g} s without success until {what}.")
        time.sleep(0.05)


def run(*command: str, environment: Mapping[str, str] | None = None) -> str:
    """Run a command; returns its stdout. Raises ClusterError with its stderr if it fails."""
    # No pipes: the daemons keep their ends open, so reading would not end.
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        result = subprocess.run(
            command,
            check=False,
            env={**SYSTEM, **(environment or {})},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
        )
        output.seek(0)
        errors.seek(0)
        stdout, stderr = output.read().strip(), errors.read().strip()
    if result.returncode:
        reason = "\n".join(filter(None, (stderr, stdout)))
        raise ClusterError(f"{' '.join(command)}: exit status {result.returncode}\n{reason}")
    return stdout


def succeeds(*command: str, environment: Mapping[str, str] | None = None) -> bool:
    with suppress(ClusterError):
        run(*command, environment=environment)
        return True
    return False
