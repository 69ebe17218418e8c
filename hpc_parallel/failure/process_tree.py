"""The processes that a process has started, also those whose parent has ended."""

from __future__ import annotations

import ctypes
import re
from contextlib import suppress
from pathlib import Path

import psutil

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_SHELLS = {"sh", "bash", "dash", "ksh", "zsh"}
_CAUGHT = re.compile(r"^SigCgt:\s*([0-9a-f]+)$", re.MULTILINE)  # the signals with a handler, a bit for each
_ROUNDS = 5  # a process may start another one while it ends
GRACE_S = 5.0  # from SIGTERM to SIGKILL


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent ends (prctl(2))."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants() -> None:
    """End all descendants by SIGTERM, and those that live after GRACE_S by SIGKILL."""
    for attempt in range(_ROUNDS):
        processes = psutil.Process().children(recursive=True)
        for process in processes:
            with suppress(psutil.Error):
                process.terminate() if attempt == 0 else process.kill()
        psutil.wait_procs(processes, timeout=GRACE_S)


def receivers(process: int, number: int) -> list[int]:
    """The processes that must get a signal for `process`.

    A shell without a trap for the signal would end and leave its programs running. Therefore the programs
    get the signal instead of the shell.
    """
    with suppress(psutil.Error, OSError):
        root = psutil.Process(process)
        is_shell = Path(root.exe()).name in _SHELLS
        if is_shell and not catches(process, number) and (programs := root.children()):
            return [receiver for program in programs for receiver in receivers(program.pid, number)]
    return [process]


def catches(process: int, number: int) -> bool:
    """Whether the process has a handler for this signal, or nobody knows it."""
    with suppress(OSError):
        caught = _CAUGHT.search(Path(f"/proc/{process}/status").read_text())
        return caught is None or bool(int(caught[1], 16) >> (number - 1) & 1)
    return True


def kill_tree(process: int) -> None:
    """Kill a process and all its descendants, also those in sessions of their own."""
    for member in tree_of(process):
        with suppress(psutil.Error):
            member.kill()


def tree_of(process: int) -> list[psutil.Process]:
    """A process and all its descendants; empty if it has ended."""
    with suppress(psutil.Error):
        root = psutil.Process(process)
        return [root, *root.children(recursive=True)]
    return []
