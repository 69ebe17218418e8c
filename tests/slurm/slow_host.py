"""A host whose ranks run only a part of the time, as if its processors were slower."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cluster import Cluster


@contextmanager
def held_back(cluster: Cluster, host: str, *, runs_s: float, pauses_s: float) -> Iterator[None]:
    """Stop and continue every rank on `host` in turn, for these times."""
    ended = threading.Event()

    def hold_back() -> None:
        while not ended.is_set():
            ranks = [pid for pid in cluster.pids(host) if "worker.main" in _command_of(pid)]
            while ranks and not ended.is_set():  # a search takes longer than the times
                with suppress(ProcessLookupError):
                    _send(signal.SIGSTOP, ranks)
                    time.sleep(pauses_s)
                    _send(signal.SIGCONT, ranks)
                    time.sleep(runs_s)
                    continue
                break

    thread = threading.Thread(target=hold_back)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _send(number: signal.Signals, pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, number)


def _command_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""
