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


def end_descendants() -> None:
    """End all descendants by SIGTERM, and those that live after GRACE_S by SIGKILL."""
    for attempt in range(_ROUNDS):
        processes = psutil.Process().children(recursive=True)
        for process in processes:
            with suppress(psutil.Error):
                process.terminate() if attempt == 0 else process.kill()
        psutil.wait_procs(processes, timeout=GRACE_S)
