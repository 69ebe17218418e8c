"""A thread in each rank that sees when the rank stands still, tells where, and ends it.

Each rank finds the time-out by itself, since one that waits in a collective makes no progress either;
who is behind is seen when all have told (supervise/hang_report.py).
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
    """A Progress that is watched until the block ends; `timeout_s` None: it is not.

    After `timeout_s` without a mark, counted from the second step on, or at another rank's alarm, this
    rank's stacks and standing are written, and once all have done so the process ends with code 1.
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
                self._tell(idle_s)
                self._end()
        except Exception:  # a full disk, say: training goes on without a watch, and the log tells
            traceback.print_exc()

    def _until_hang(self) -> float | None:
        """Seconds without progress, once they are too many or another rank gives the alarm; None at the end.

        Only time in which this thread could run counts: a job that is suspended, or a rank that was
        stopped and continued, has not hung for as long as that took.
        """
        period_s = self.timeout_s / hang_report.LOOKS
        seen, idle_s, woke = self.progress.now, 0.0, time.monotonic()
        while not self.closed.wait(min(period_s, max(_POLL_S, self.timeout_s - idle_s))):
            before, woke = woke, time.monotonic()
            awake_s = min(woke - before, 2 * period_s)
            now = self.progress.now
            idle_s = min(woke - now[0], awake_s) if now is not seen else idle_s + awake_s
            seen = now
            _, phase, step = now
            watched = step > self.progress.first_step and phase != "done"
            if watched and idle_s >= self.timeout_s:
                hang_report.raise_alarm(self.folder, attempt=self.world.attempt)
                return idle_s
            if hang_report.alarm(self.folder, attempt=self.world.attempt):
                return idle_s
        return None

    def _tell(self, idle_s: float) -> None:
        with replacing(hang_report.stacks(self.folder, self.world.rank)) as file:
            faulthandler.dump_traceback(file, all_threads=True)
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        stack = traceback.extract_stack(frame)
        own = [entry for entry in stack if not entry.filename.startswith(_TORCH)]
        _, phase, step = self.progress.now
        self.standing = HangReport(
            rank=self.world.rank,
            host=self.world.host,
            world_size=self.world.world_size,
            attempt=self.world.attempt,
            phase=phase,
            step=step,
            idle_s=idle_s,
            where=hang_report.spot(own[-1].filename, own[-1].lineno, own[-1].name),
            stack="".join(traceback.format_list(stack)).splitlines(),
            collective=last_collective(),
            unreachable=self._unreachable(),
        )
        hang_report.write_report(self.folder, self.standing)
        print(f"no progress for {idle_s:.0f} s: {self.standing.place}", file=sys.stderr, flush=True)

    def _unreachable(self) -> str | None:
        """Rank 0's address, where the network does not take us there. Refused: its host is there."""
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
        """Wait until all have told, and end the process even where its main thread is in C code."""
        deadline = time.monotonic() + self.grace_s
        while time.monotonic() < deadline:
            if hang_report.all_reported(self.folder, world=self.world):
                break
            time.sleep(_POLL_S)
        message = f"no progress for {self.standing.idle_s:.0f} s, {self.standing.place}"
        failure.record_hang(self.folder, world=self.world, message=message, stack=self.standing.stack)
        os._exit(1)


def last_collective() -> Collective | None:
    """The one that this process waits in, or the last that it began, by torch's flight recorder.

    None where there was none, or where TORCH_FR_BUFFER_SIZE=0 turned the recorder off.
    """
    try:
        entries = recorded()
    except (AttributeError, RuntimeError, ValueError):  # not in every build of torch
        return None
    if not entries:
        return None
    begun = entries[-1]
    for entry in reversed(entries):  # of several under way, they wait for the first
        if entry["retired"]:
            break
        begun = entry
    return Collective(
        name=begun["profiling_name"].rpartition(":")[2],
        group=begun["process_group"][1],
        sequence=begun["p2p_seq_id" if begun["is_p2p"] else "collective_seq_id"],
        complete=begun["retired"],
    )


def _address_of_store(folder: RunFolder, *, world: World) -> tuple[str, int] | None:
    """Looked up while the network is whole: a name server may be on the other side of what breaks."""
    published = read_json(folder.rendezvous / f"{world.attempt}.json")
    if world.rank == 0 or not published or "port" not in published:
        return None
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(published["host"], published["port"], type=socket.SOCK_STREAM)
        return str(found[0][4][0]), int(found[0][4][1])
    return None
