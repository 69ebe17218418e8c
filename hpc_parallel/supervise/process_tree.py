"""The processes that a process has started, also those whose parent has ended."""

from __future__ import annotations

import ctypes
from contextlib import suppress

import psutil

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_ROUNDS = 5  # a process may start another one while it ends
GRACE_S = 5.0  # from SIGTERM to SIGKILL


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent ends (prctl(2))."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants(*, grace_s: float = GRACE_S) -> int:
    """End all descendants by SIGTERM, then by SIGKILL; returns how many there were."""
    ended = 0
    for attempt in range(_ROUNDS):
        processes = [process for process in psutil.Process().children(recursive=True) if _lives(process)]
        if not processes:
            break
        ended += len(processes)
        for process in processes:
            with suppress(psutil.Error):
                process.terminate() if attempt == 0 else process.kill()
        _, alive = psutil.wait_procs(processes, timeout=grace_s)
        for process in alive:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(alive, timeout=grace_s)
    return ended


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
