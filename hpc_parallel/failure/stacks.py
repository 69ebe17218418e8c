"""The Python stacks that faulthandler and py-spy write."""

from __future__ import annotations

import re
from pathlib import Path

# The innermost function of the thread that reads batches (training/read_ahead.py) while it reads nothing.
WAITS_FOR_REQUEST = "_read_requested"
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)$')
NATIVE = '  Binary file "'  # the beginning of a frame of C code


def stack_of(text: str) -> list[str]:
    """The frames of the main thread, outermost first: faulthandler writes the oldest thread last."""
    return next(reversed(stacks_of(text)), [])


def reader_of(text: str) -> list[str]:
    """The frames of the thread that reads the next batch; empty if it reads no batch now."""
    for stack in stacks_of(text)[:-1]:
        functions = [line.rpartition(" in ")[2] for line in stack]
        if WAITS_FOR_REQUEST in functions[:-1]:
            return stack
    return []


def place_of_crash(text: str) -> tuple[str, list[str]]:
    """Where the last fatal error of `text` happened, as a clause, and the frames; empty if there is none.

    If it happened in a thread of C code, the clause says where the main thread was.
    """
    _, error, crash = text.rpartition("Fatal Python error: ")
    if frames := stack_of(crash.partition("Current thread ")[2].partition("\n\n")[0]):
        return f" at {spot_of(frames)}", frames
    frames = stack_of(crash) if error else []
    return f"; its main thread was at {spot_of(frames)}" if frames else "", frames


def stack_at_sigterm(text: str) -> list[str]:
    """The frames at the end of a log, as worker/stop.py lets a rank write them; else nothing."""
    _, header, end = text.rpartition("Stack (most recent call first):\n")
    stack = end.splitlines()
    return stack[::-1] if header and all(map(_FRAME.match, stack)) else []


def stacks_of(text: str) -> list[list[str]]:
    """The frames of each thread, outermost first. A thread without Python code is left out."""
    stacks: list[list[str]] = []
    in_stack = False
    for line in text.splitlines():
        is_frame = _FRAME.match(line) is not None or line.startswith(NATIVE)
        if is_frame and in_stack:
            stacks[-1].insert(0, line)
        elif is_frame:
            stacks.append([line])
        in_stack = is_frame
    return [stack for stack in stacks if any(map(_FRAME.match, stack))]


def spot_of(stack: list[str]) -> str:
    """The innermost frame outside torch, as text."""
    frames = [match for line in stack if (match := _FRAME.match(line))]
    outside_torch = [match for match in frames if "/torch/" not in match["file"]]
    if not frames:
        return "a place that could not be read"
    innermost = (outside_torch or frames)[-1]
    return format_frame(innermost["file"], int(innermost["line"]), innermost["name"])


def format_frame(file: str, line: int | None, name: str) -> str:
    """Format a frame as `folder/file.py:12 in name`."""
    return f"{'/'.join(Path(file).parts[-2:])}:{line} in {name}"
