"""Send a signal to the ranks of a run on this host: not every mpirun passes signals on."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress

import psutil

from hpc_parallel.supervise.rank_process import WORKER


def main(arguments: Sequence[str]) -> None:
    """arguments: the run folder and the name of the signal, such as USR2."""
    folder, name = arguments
    for pid in ranks_here(folder):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.Signals[f"SIG{name}"])


def ranks_here(folder: str) -> list[int]:
    """Process ids of this user's ranks of the run on this host."""
    module = list(WORKER[-2:])  # -m hpc_parallel.worker.main
    return [
        process.pid
        for process in psutil.process_iter(["cmdline", "uids"])
        if (process.info["cmdline"] or [])[-3:] == [*module, folder]
        and process.info["uids"].real == os.geteuid()
    ]
