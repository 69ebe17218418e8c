"""Why a user's script failed, and where its ranks stand in a hang.

The cause of a failure is in the file of torch's `@record`, or else in the rank's error log.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

import psutil

from hpc_parallel.failure import failure, hang_report, normal_end
from hpc_parallel.failure.flight_recorder import DumpRequest
from hpc_parallel.failure.process_tree import tree_of
from hpc_parallel.failure.supervisor import PERIOD_S, Supervisor, state_of
from hpc_parallel.machine.world import World
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import DamagedError, read_json, read_tail, size_of
from hpc_parallel.record.values import table, text
from hpc_parallel.script.script_rank import error_file
from hpc_parallel.user_code import is_users

_TAIL_BYTES = 64 * 1024
_UNCAUGHT = 1  # Python's exit code after an exception
# torch writes "Original" before the traceback of a DataLoader's worker.
_TRACEBACK = re.compile(r"\s*(Original )?Traceback \(most recent call last\):\s*")
_GOES_ON = re.compile("Exception ignored |Exception in thread |Error in atexit")  # before a traceback
# torch puts the rank before each line of a traceback, and Python a margin before those of an exception group.
_BEFORE = re.compile(r"^(\[rank\d+\]: ?)?(  \| |  \+ Exception Group (?=Traceback))?")
_PART = "  +-+-"  # comes before the first exception of a group
_NOISE = re.compile(r"\s|$|\[?[IWEF]\d+[ \]]|.* NCCL [A-Z]+ ")  # indented lines, and logs of torch and NCCL
_FRAME = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+)')
_EXCEPTION = re.compile(r"^(?P<name>[A-Za-z_][\w.]*)(?:: (?P<text>.*))?$")
_OF_TORCHRUN = re.compile(r"  (?:rank|exitcode) +: ")  # of a failed rank; that of the first failure is last
_ABORT = re.compile(r"terminate called |\s+what\(\): |Aborted")  # by C++
_KILLED = re.compile(r"\bkilled\b|exited unexpectedly|exit code 137\b", re.IGNORECASE)  # 137: by SIGKILL
_STACKS = "Fatal Python error: "  # by faulthandler
_MOST_LINES = 200
_POLL_S = 0.2
_ANSWER_S = 12.0  # NCCL's answer took up to 11 s on a GPU that four ranks shared
FIRST_S = 60.0  # a script may print nothing for so long at its start, while it imports and connects


def record(
    folder: RunFolder, *, world: World, returncode: int, log_start: int, cgroup: str | None = None
) -> None:
    """Record the failure of a script that exited with a code above 0, or that was aborted after an exception.

    log_start: the size of the error log when the script started; cgroup: as `failure.record_death` has it.
    """
    of_memory = f"; out of memory in cgroup {cgroup}" if cgroup else ""
    lines, after = _recorded_traceback(folder, rank=world.rank), list[str]()
    tail = _tail(folder.log(world.rank, "err"), start=log_start)
    if not lines and returncode in (_UNCAUGHT, -signal.SIGABRT):
        lines, after = last_traceback(tail)
    name, message = exception_of(lines)
    if name is None:
        last = next((line.strip() for line in reversed(tail) if line.strip()), "")
        message = f"the script ended with exit code {returncode}" + (f": {last}" if last else "")
        message += of_memory * bool(_KILLED.search(message))
        failure.record_reason(folder, world=world, kind=failure.ERROR, message=message, lines=tail)
        return
    place = users_line(lines)
    short = name.rpartition(".")[2]
    if short == "ChildFailedError":  # the lines after this traceback say more
        lines, after = tail, []
        failed = [" ".join(line.split()) for line in tail if _OF_TORCHRUN.match(line)]
        message = ", ".join(failed[-2:])
    sentence = (f"{short}: {message}" if message else short) + (f" ({place})" if place else "")
    more = takewhile(lambda line: not _GOES_ON.match(line), after)
    if returncode == -signal.SIGABRT:
        sentence += ", then SIGABRT at its exit"
    elif said := [line.strip() for line in more if not _NOISE.match(line)]:
        sentence += f"; the log ends with: {said[-1]}"  # the script may have handled the exception
    sentence += of_memory * bool(_KILLED.search(message))  # of a DataLoader's worker, for example
    failure.record_reason(
        folder, world=world, kind=failure.kind_of_text(short, message), message=sentence, lines=lines,
        details={"where": place} if place else {},
    )  # fmt: skip


def was_aborted_at_exit(folder: RunFolder, *, rank: int, log_start: int) -> bool:
    """Whether the error log ends with a traceback, apart from the lines about the abort.

    Threads of gloo may abort a process that leaves because of an exception (torch 2.13).
    """
    lines = takewhile(
        lambda line: not line.startswith(_STACKS), _tail(folder.log(rank, "err"), start=log_start)
    )
    trace, after = last_traceback([line for line in lines if line.strip() and not _ABORT.match(line)])
    return bool(trace) and not after


def last_traceback(lines: Sequence[str]) -> tuple[list[str], list[str]]:
    """The last traceback in a log, to the last indented line of its message, and the lines after it.

    Those of threads and of clean-up do not end the process, so they count only if there is no other.
    """
    starts = [index for index, line in enumerate(lines) if _TRACEBACK.fullmatch(line)]
    ending = [index for index in starts if index == 0 or not _GOES_ON.match(lines[index - 1])]
    start = (ending or starts)[-1] if starts else _syntax_error(lines)
    for end in range(start + 1, len(lines)) if start is not None else ():
        if _EXCEPTION.match(lines[end]):
            more = [*takewhile(lambda line: line[:1].isspace() and line.strip(), lines[end + 1 :])]
            return [*lines[start : end + 1], *more], [*lines[end + 1 + len(more) :]]
    return [], []


def _syntax_error(lines: Sequence[str]) -> int | None:
    """The line at which a syntax error begins, because its traceback has no heading."""
    errors = [index for index, line in enumerate(lines) if re.match(r"(Syntax|Indentation|Tab)Error: ", line)]
    frames = [
        index for index, line in enumerate(lines) if errors and index < errors[-1] and _FRAME.match(line)
    ]
    return frames[-1] if frames else None


def exception_of(lines: Sequence[str]) -> tuple[str | None, str]:
    """The class of the exception and its message, from the end of a traceback."""
    for number, line in reversed([*enumerate(lines, 1)]):
        if match := _EXCEPTION.match(line):
            more = takewhile(lambda line: not line.startswith(_PART), lines[number:])
            return match["name"], " ".join(" ".join([match["text"] or "", *more]).split())
    return None, ""


def users_line(lines: Sequence[str]) -> str | None:
    """The innermost line in a file that is not part of Python or an installed package: `train.py:12`."""
    for line in reversed(lines):
        if (match := _FRAME.match(line)) and is_users(match["file"]):
            return f"{Path(match['file']).name}:{match['line']}"
    return None


def _recorded_traceback(folder: RunFolder, *, rank: int) -> list[str]:
    """The traceback in the file of torch's `@record`; empty if there is none."""
    with suppress(DamagedError, OSError):
        message = table((read_json(error_file(folder, rank=rank)) or {}).get("message"))
        stack = text(table(message.get("extraInfo")).get("py_callstack"))
        return last_traceback((stack or "").splitlines())[0]
    return []


def _tail(path: Path, *, start: int) -> list[str]:
    """The last lines of a log that were written after its byte `start`, without _BEFORE."""
    with suppress(OSError, DamagedError):
        text = read_tail(path, limit_bytes=_TAIL_BYTES, start=start).decode(errors="replace")
        return [_BEFORE.sub("", line) for line in text.splitlines()[-_MOST_LINES:]]
    return []


class ScriptSupervisor(Supervisor):
    """Notices that no rank of a script writes anything, and finds where each rank stands.

    A script does not report its progress, so one parent looks at the logs of all ranks: that of rank 0, or
    else of the lowest rank that has not ended. At the alarm each parent asks NCCL in its rank for a dump and
    py-spy for the stacks, and then stops its rank by SIGSTOP. Without py-spy, reading a stack ends the rank,
    so the parent first waits until all ranks are stopped. Otherwise the others would lose a peer, and fail
    before their stacks are read.
    """

    is_script = True

    def __init__(
        self,
        folder: RunFolder,
        *,
        world: World,
        process: int,
        timeout_s: float,
        environment: Mapping[str, str],
    ) -> None:
        """environment: that of the process."""
        super().__init__(folder, world=world, process=process, timeout_s=timeout_s)
        self._request = DumpRequest.of(folder, rank=world.rank, environment=environment)
        self._spied: str | None = None
        self._lowest = 0  # the lowest rank that had not ended at the last check
        self._sizes = self._sizes_now()
        self._silent_s, self._limit_s = 0.0, max(FIRST_S, timeout_s)
        self._was_stopped = False  # by another process, before the alarm

    def hangs(self, elapsed_s: float, *, stopped: bool) -> bool:
        """Whether the process was stopped, or all ranks were silent, for the whole time-out."""
        while self._lowest < self.world.rank and normal_end.has_ended(self.folder, rank=self._lowest):
            self._lowest += 1
        sizes = self._sizes_now()
        if sizes != self._sizes:
            self._silent_s, self._limit_s = 0.0, self.timeout_s
        self._silent_s += elapsed_s
        self._sizes = sizes
        silent = self.world.rank == self._lowest and self._silent_s >= self._limit_s
        return super().hangs(elapsed_s, stopped=stopped) or silent

    def _sizes_now(self) -> list[int]:
        if self.world.rank != self._lowest:
            return []
        ranks, streams = range(self.world.world_size), ("out", "err")
        logs = [self.folder.log(rank, stream) for rank in ranks for stream in streams]
        return [size_of(file) for file in (*logs, self.folder.metrics)]

    def on_alarm(self) -> None:
        """See where the rank stands, and stop it there."""
        self.process = python_of(self.process)
        self._was_stopped = state_of(self.process) == "T"
        if not self._was_stopped:
            with suppress(OSError):  # a file server may fail: the rank is stopped and reported all the same
                self._look()
            with suppress(OSError):
                os.kill(self.process, signal.SIGSTOP)
            self.alarmed_at = time.monotonic()  # the other ranks may be stopped as late as this one

    def _look(self) -> None:
        """Read what needs a process that runs: the dump of NCCL and the stacks with frames of C code."""
        request = self._request
        was_sent = request is not None and request.send()
        self._spied = spied_stacks(self.process, native=True)
        if request is None or not was_sent:
            return
        until = time.monotonic() + max(_ANSWER_S, hang_report.grace_s(self.timeout_s))
        while self._without_answer(request) and state_of(self.process) and time.monotonic() < until:
            time.sleep(_POLL_S)
        while (answer := request.answer()) is None and state_of(self.process) and time.monotonic() < until:
            time.sleep(_POLL_S)
        self.device = answer

    def _without_answer(self, request: DumpRequest) -> set[int]:
        ranks = request.ranks_without_answer(self.world.world_size)
        return {rank for rank in ranks if not normal_end.has_ended(self.folder, rank=rank)}

    def report(self, *, stopped: bool) -> None:
        """Write the report, and wait for the reports of the others: the end of this parent ends the job."""
        super().report(stopped=self._was_stopped)
        until = time.monotonic() + hang_report.grace_s(self.timeout_s)
        while not self.others_reported() and time.monotonic() < until:
            time.sleep(min(self.period_s, PERIOD_S))

    def stacks(self) -> str:
        """End the rank and return its stacks. py-spy reads them; if it can't, faulthandler prints them."""
        spied, dumped = self._spied or spied_stacks(self.process, native=False), super().stacks()
        return spied or dumped


def python_of(process: int) -> int:
    """The first Python among a process and its descendants; the process itself if there is none."""
    for member in tree_of(process):
        with suppress(psutil.Error):
            if "python" in os.path.basename(member.exe()):  # torch changes the name of its process
                return int(member.pid)
    return process


_DUMP_S = 8.0  # py-spy reads the symbols of all libraries


def spied_stacks(process: int, *, native: bool) -> str | None:
    """The stacks of a process as faulthandler writes them: innermost frame first, main thread last.

    py-spy (github.com/benfred/py-spy) reads the memory of the process, so it also works if a script has
    disabled faulthandler.

    native: with the frames of C code, for which py-spy pauses the process; else the process is stopped, and
    py-spy can't stop it once more. Returns None without py-spy, for a process that is not Python, and if the
    system forbids the access (ptrace_scope).
    """
    if (program := find_py_spy()) is None:
        return None
    mode = "--native" if native else "--nonblocking"
    command = [program, "dump", "--pid", str(process), mode, "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DUMP_S)
        threads = sorted(json.loads(done.stdout), key=lambda thread: thread["os_thread_id"] == thread["pid"])
        stacks = [_stack(thread) for thread in threads]
    except (OSError, subprocess.TimeoutExpired, ValueError, LookupError, TypeError):
        return None
    return "\n".join(stacks) or None


def find_py_spy() -> str | None:
    """The program, beside this Python or on the PATH."""
    folders = [os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)]
    return shutil.which("py-spy", path=os.pathsep.join(folders))


def _stack(thread: Mapping[str, Any]) -> str:
    frames = [
        f'  Binary file "{frame["module"]}", at {frame["name"]}\n'  # as Python 3.14 writes frames of C code
        if frame.get("module") else f'  File "{frame["filename"]}", line {frame["line"]} in {frame["name"]}\n'
        for frame in thread["frames"]
    ]  # fmt: skip
    return f"Thread {thread['thread_name']} (most recent call first):\n{''.join(frames)}"
