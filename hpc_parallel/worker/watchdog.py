"""A thread in each rank that detects a hang, reports where the rank is, and ends the rank.

Each rank detects the time-out by itself, because a rank that waits in a collective makes no progress either.
supervise/hang_report.py finds the rank that is behind after all ranks have reported.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import read_json
from hpc_parallel.record.safe_write import replacing
from hpc_parallel.supervise import failure, hang_report
from hpc_parallel.supervise.flight_recorder import recorded
from hpc_parallel.supervise.hang_report import Collective, HangReport
from hpc_parallel.supervise.progress import Progress
from hpc_parallel.supervise.world import World

_POLL_S = 0.2
_TORCH = str(Path(torch.__file__).parent)


@contextlib.contextmanager
def watch(folder: RunFolder, *, world: World, timeout_s: float | None) -> Iterator[Progress]:
    """Watch the Progress that the trainer marks, until the block ends; with `timeout_s` None, do not watch.

    If there is no mark for `timeout_s` from the second step on, or if another rank raises the alarm, this
    rank writes its stacks and its report. After all ranks have done so, the process ends with code 1.
    """
    progress = Progress()
    if timeout_s is None:
        yield progress
        return
    hang_report.forget(folder, world=world)
    closed = threading.Event()
    watchdog = _Watchdog(folder, world=world, timeout_s=timeout_s, progress=progress, closed=closed)
    threading.Thread(target=watchdog.run, name="watchdog", daemon=True).start()
    try:
        yield progress
    finally:
        closed.set()


class _Watchdog:
    def __init__(
        self,
        folder: RunFolder,
        *,
        world: World,
        timeout_s: float,
        progress: Progress,
        closed: threading.Event,
    ) -> None:
        self.folder, self.world, self.timeout_s = folder, world, timeout_s
        self.progress, self.closed = progress, closed
        self.store = _address_of_store(folder, world=world)
        self.grace_s = hang_report.grace_s(timeout_s)

    def run(self) -> None:
        try:
            idle_s = self._until_hang()
            if idle_s is not None:
                self._report(idle_s)
                self._end()
        except Exception:  # a full disk, for example: training continues without a watchdog
            traceback.print_exc()

    def _until_hang(self) -> float | None:
        """Returns the seconds without progress at the time-out or at another rank's alarm; None at the end.

        Only time in which this thread could run counts, because a job that was suspended, or a rank that was
        stopped and continued, did not hang in that time.
        """
        period_s = self.timeout_s / hang_report.LOOKS
        last_mark, idle_s, woke = self.progress.now, 0.0, time.monotonic()
        while not self.closed.wait(min(period_s, max(_POLL_S, self.timeout_s - idle_s))):
            before, woke = woke, time.monotonic()
            awake_s = min(woke - before, 2 * period_s)
            mark = self.progress.now
            idle_s = min(woke - mark[0], awake_s) if mark is not last_mark else idle_s + awake_s
            last_mark = mark
            _, phase, step = mark
            watched = step > self.progress.first_step and phase != "done"
            if watched and idle_s >= self.timeout_s:
                hang_report.raise_alarm(self.folder, attempt=self.world.attempt)
                return idle_s
            if hang_report.alarm(self.folder, attempt=self.world.attempt):
                return idle_s
        return None

    def _report(self, idle_s: float) -> None:
        with replacing(hang_report.stacks(self.folder, self.world.rank)) as file:
            faulthandler.dump_traceback(file, all_threads=True)
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        stack = traceback.extract_stack(frame)
        innermost = [entry for entry in stack if not entry.filename.startswith(_TORCH)][-1]
        _, phase, step = self.progress.now
        self.standing = HangReport(
            rank=self.world.rank,
            host=self.world.host,
            world_size=self.world.world_size,
            attempt=self.world.attempt,
            phase=phase,
            step=step,
            idle_s=idle_s,
            where=hang_report.format_frame(innermost.filename, innermost.lineno, innermost.name),
            stack="".join(traceback.format_list(stack)).splitlines(),
            collective=last_collective(),
            unreachable=self._unreachable(),
        )
        hang_report.write_report(self.folder, self.standing)
        print(f"no progress for {idle_s:.0f} s: {self.standing.place}", file=sys.stderr, flush=True)

    def _unreachable(self) -> str | None:
        """Returns rank 0's address if its host can't be reached. A refused connection reaches the host."""
        if self.store is None:
            return None
        try:
            socket.create_connection(self.store, timeout=hang_report.PROBE_S).close()
        except ConnectionRefusedError:
            pass
        except OSError:
            return f"{self.store[0]}:{self.store[1]}"
        return None

    def _end(self) -> None:
        """Wait until all ranks have reported, and end the process even if its main thread is in C code."""
        deadline = time.monotonic() + self.grace_s
        while time.monotonic() < deadline:
            if hang_report.all_reported(self.folder, world=self.world):
                break
            time.sleep(_POLL_S)
        message = f"no progress for {self.standing.idle_s:.0f} s, {self.standing.place}"
        failure.record_hang(self.folder, world=self.world, message=message, stack=self.standing.stack)
        os._exit(1)


def last_collective() -> Collective | None:
    """Returns the collective that this process waits in, or the last one that it began.

    Reads torch's flight recorder. None if there was none, or if TORCH_FR_BUFFER_SIZE=0 turns it off.
    """
    try:
        entries = recorded()
    except (AttributeError, RuntimeError, ValueError):  # some builds of torch have no recorder
        return None
    if not entries:
        return None
    last = entries[-1]
    for entry in reversed(entries):  # if several are in progress, the others wait for the first
        if entry["retired"]:
            break
        last = entry
    return Collective(
        name=last["profiling_name"].rpartition(":")[2],
        group=last["process_group"][1],
        sequence=last["p2p_seq_id" if last["is_p2p"] else "collective_seq_id"],
        complete=last["retired"],
    )


def _address_of_store(folder: RunFolder, *, world: World) -> tuple[str, int] | None:
    """Look up rank 0's address now, because the name server may be unreachable after the network fails."""
    published = read_json(folder.rendezvous / f"{world.attempt}.json")
    if world.rank == 0 or not published or "port" not in published:
        return None
    with contextlib.suppress(OSError):
        addresses = socket.getaddrinfo(published["host"], published["port"], type=socket.SOCK_STREAM)
        return str(addresses[0][4][0]), int(addresses[0][4][1])
    return None
