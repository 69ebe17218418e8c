"""Why a user's script failed: from the file of torch's `@record`, or else from the rank's error log."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from hpc_parallel.failure import failure
from hpc_parallel.failure.script_rank import error_file
from hpc_parallel.machine.world import World
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import DamagedError, open_regular, read_json
from hpc_parallel.record.values import table, text
from hpc_parallel.user_code import is_users

_TAIL_BYTES = 64 * 1024
_UNCAUGHT = 1  # Python's exit code after an exception
_TRACEBACK = "Traceback (most recent call last):"
_RANK = re.compile(r"^\[rank\d+\]: ?")  # torch puts this before each line of a traceback
_FRAME = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+)')
_EXCEPTION = re.compile(r"^(?P<name>[A-Za-z_][\w.]*)(?:: (?P<text>.*))?$")
_ABORT = re.compile(r"terminate called |\s+what\(\): |Aborted")  # by C++
_STACKS = "Fatal Python error: "  # by faulthandler
_MOST_LINES = 200


def record(folder: RunFolder, *, world: World, returncode: int, log_start: int) -> None:
    """Record the failure of a script that exited with a code above 0, or that was aborted after an exception.

    log_start: the size of the error log when the script started.
    """
    lines = _recorded_traceback(folder, rank=world.rank)
    tail = _tail(folder.log(world.rank, "err"), start=log_start)
    if not lines and returncode in (_UNCAUGHT, -signal.SIGABRT):
        lines = last_traceback(tail)
    name, message = exception_of(lines)
    if name is None:
        last = next((line.strip() for line in reversed(tail) if line.strip()), "")
        message = f"the script ended with exit code {returncode}" + (f": {last}" if last else "")
        failure.record_reason(folder, world=world, kind=failure.ERROR, message=message, lines=tail)
        return
    place = users_line(lines)
    short = name.rpartition(".")[2]
    sentence = (f"{short}: {message}" if message else short) + (f" ({place})" if place else "")
    sentence += ", then SIGABRT at its exit" if returncode == -signal.SIGABRT else ""
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
    written = [line for line in lines if line.strip() and not _ABORT.match(line)]
    trace = last_traceback(written)
    return bool(trace) and trace[-1] == written[-1]


def last_traceback(lines: Sequence[str]) -> list[str]:
    """The last traceback in the lines of a log, to the line that names its exception; empty without one."""
    starts = [index for index, line in enumerate(lines) if line.strip() == _TRACEBACK]
    start = starts[-1] if starts else _syntax_error(lines)
    if start is None:
        return []
    for end in range(start + 1, len(lines)):
        if _EXCEPTION.match(lines[end]):
            return list(lines[start : end + 1])
    return []


def _syntax_error(lines: Sequence[str]) -> int | None:
    """The line at which a syntax error begins, because its traceback has no heading."""
    errors = [index for index, line in enumerate(lines) if re.match(r"(Syntax|Indentation|Tab)Error: ", line)]
    frames = [
        index for index, line in enumerate(lines) if errors and index < errors[-1] and _FRAME.match(line)
    ]
    return frames[-1] if frames else None


def exception_of(lines: Sequence[str]) -> tuple[str | None, str]:
    """The class of the exception and its message, from the end of a traceback."""
    for line in reversed(lines):
        if match := _EXCEPTION.match(line):
            return match["name"], " ".join((match["text"] or "").split())
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
        return last_traceback((stack or "").splitlines())
    return []


def _tail(path: Path, *, start: int) -> list[str]:
    """The last lines of a log that were written after its byte `start`, without torch's prefix."""
    with suppress(OSError, DamagedError), open_regular(path) as file:
        end = file.seek(0, 2)
        file.seek(max(start, end - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()[-_MOST_LINES:]
        return [_RANK.sub("", line) for line in lines]
    return []


def forget(folder: RunFolder, *, rank: int) -> None:
    """Remove the file of an earlier start."""
    error_file(folder, rank=rank).unlink(missing_ok=True)
