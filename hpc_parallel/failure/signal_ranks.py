"""Send a signal to the ranks of a run on this host: not every mpirun passes signals on."""

from __future__ import annotations

import os
import platform
import signal
from collections.abc import Sequence
from contextlib import suppress

import psutil

from hpc_parallel.failure.rank_process import WORKER


def main(arguments: Sequence[str]) -> None:
    """arguments: the run folder and the name of the signal, such as USR2."""
    folder, name = arguments
    pids = ranks_here(folder)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.Signals[f"SIG{name}"])
    if pids:
        print(f"sent SIG{name} to {len(pids)} processes on {platform.node()}")


def ranks_here(folder: str) -> list[int]:
    """Process ids of this user's ranks of the run on this host."""
    worker = [*WORKER[-2:], folder]  # -m hpc_parallel.worker.main
    parent = ["-m", "hpc_parallel.job", "rank", folder]  # a script's parent passes the signal on
    return [
        process.pid
        for process in psutil.process_iter(["cmdline", "uids"])
        if (command := process.info["cmdline"] or [])[-3:] == worker or command[1:] == parent
        if process.info["uids"].real == os.geteuid()
    ]
