"""A thread in each rank that detects a hang, reports where the rank is, and ends the rank.

Each rank detects the time-out by itself, because a rank that waits in a collective makes no progress either.
failure/hang_cause.py finds the rank that is behind after all ranks have reported.
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
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.distributed import DistStoreError

from hpc_parallel.failure import failure, hang_report
from hpc_parallel.failure.flight_recorder import (
    Collective,
    by_group,
    collective_of,
    device_progress,
    recorded,
)
from hpc_parallel.failure.hang_report import READER, HangReport
from hpc_parallel.failure.stacks import WAITS_FOR_REQUEST, format_frame
from hpc_parallel.machine.world import World
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import replacing
from hpc_parallel.record.typed import read_record
from hpc_parallel.start.rendezvous import Published
from hpc_parallel.start.signed_store import SignedStore
from hpc_parallel.strategies.groups import SAVING
from hpc_parallel.torch_internals import process_groups
from hpc_parallel.training.observers import Progress

_POLL_S = 0.2
COMPILES = 6  # a first step that compiles may take this many times the time-out
FIRST_S = 60.0  # the least time-out of a first step, which connects the ranks and loads kernels
_TORCH = str(Path(torch.__file__).parent)
SERVE_S = 1.0  # rank 0's process is the store, so it goes on for this long after the last key is set
_ALL = "hang/all"
_LEAST_S = 0.01  # torch treats 0 as no time-out


@contextlib.contextmanager
def watch(
    folder: RunFolder,
    *,
    world: World,
    timeout_s: float | None,
    store: SignedStore | None = None,
    compiles: bool = False,
) -> Iterator[Progress]:
    """Watch the Progress that the trainer marks, until the block ends; with `timeout_s` None, do not watch.

    If there is no mark for `timeout_s` from the first step on, or if another rank raises the alarm, this
    rank writes its stacks and its report. After all ranks have done so, the process ends with code 1.
    The ranks learn through `store`, the key-value store of this start, that all have reported. Without the
    store, each rank waits for a time that suffices.
    The time-out of the first step is at least a minute, and longer if the step `compiles`.
    """
    progress = Progress()
    if timeout_s is None:
        yield progress
        return
    hang_report.forget(folder, world=world)
    closed = threading.Event()
    watchdog = _Watchdog(
        folder=folder, world=world, progress=progress, closed=closed, store=store, timeout_s=timeout_s,
        first_timeout_s=max(FIRST_S, timeout_s * COMPILES if compiles else timeout_s),
    )  # fmt: skip
    threading.Thread(target=watchdog.run, name="watchdog", daemon=True).start()
    try:
        yield progress
    finally:
        closed.set()


@dataclass(kw_only=True)
class _Watchdog:
    folder: RunFolder
    world: World
    timeout_s: float
    first_timeout_s: float
    progress: Progress
    closed: threading.Event
    store: SignedStore | None = None

    def __post_init__(self) -> None:
        self.address = _address_of_store(self.folder, world=self.world)
        self.grace_s = hang_report.grace_s(self.timeout_s)

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
        last_mark, idle_s, woke = self.progress.latest, 0.0, time.monotonic()
        limit_s = self.first_timeout_s
        while not self.closed.wait(min(period_s, max(_POLL_S, limit_s - idle_s))):
            before, woke = woke, time.monotonic()
            awake_s = min(woke - before, 2 * period_s)
            mark = self.progress.latest
            idle_s = min(woke - mark[0], awake_s) if mark is not last_mark else idle_s + awake_s
            last_mark = mark
            _, phase, step = mark
            limit_s = self.first_timeout_s if step <= self.progress.first_step else self.timeout_s
            if phase not in ("start", "done") and idle_s >= limit_s:
                hang_report.raise_alarm(self.folder, attempt=self.world.attempt)
                return idle_s
            if hang_report.alarm(self.folder, attempt=self.world.attempt):
                return idle_s
        return None

    def _report(self, idle_s: float) -> None:
        with replacing(hang_report.stacks(self.folder, self.world.rank)) as file:
            faulthandler.dump_traceback(file, all_threads=True)
        _, phase, step = self.progress.latest
        stack = stack_in(phase)
        innermost = [entry for entry in stack if not entry.filename.startswith(_TORCH)][-1]
        self.hang_report = HangReport(
            rank=self.world.rank,
            host=self.world.host,
            world_size=self.world.world_size,
            attempt=self.world.attempt,
            phase=phase,
            step=step,
            idle_s=idle_s,
            where=format_frame(innermost.filename, innermost.lineno, innermost.name),
            stack="".join(traceback.format_list(stack)).splitlines(),
        )
        # The next lines may not return: a query of a GPU that hangs, or a network that is gone.
        hang_report.write_report(self.folder, self.hang_report)
        self.hang_report = replace(
            self.hang_report, unreachable=self._unreachable(), **collectives(self.progress)
        )
        hang_report.write_report(self.folder, self.hang_report)
        print(f"no progress for {idle_s:.0f} s: {self.hang_report.place}", file=sys.stderr, flush=True)

    def _unreachable(self) -> str | None:
        """Returns rank 0's address if its host can't be reached. A refusal shows that it can be."""
        if self.address is None:
            return None
        try:
            socket.create_connection(self.address, timeout=hang_report.PROBE_S).close()
        except ConnectionRefusedError:
            pass
        except OSError:
            return f"{self.address[0]}:{self.address[1]}"
        return None

    def _end(self) -> None:
        """Wait until all ranks have reported, and end the process even if its main thread is in C code."""
        store = None if self.hang_report.unreachable else self.store
        meet_hang(store, world=self.world, within_s=self.grace_s)
        message = f"no progress for {self.hang_report.idle_s:.0f} s, {self.hang_report.place}"
        failure.record_hang(self.folder, world=self.world, message=message, stack=self.hang_report.stack)
        os._exit(1)


def stack_in(phase: str) -> traceback.StackSummary:
    """The stack of the main thread, or of the thread it waits for: the reader of a batch, or a replica."""
    threads = {thread.name: thread.ident for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sys._current_frames()
    reader = frames.get(threads.get(READER) or 0) if phase == "data" else None
    if reader is None or reader.f_code.co_name == WAITS_FOR_REQUEST:
        reader = frames[main or 0]
    for frame, _ in islice(traceback.walk_stack(reader), 3):  # nn.DataParallel joins a thread a replica
        thread = frame.f_locals.get("self")
        if frame.f_code.co_name == "join" and isinstance(thread, threading.Thread):
            reader = frames.get(thread.ident or 0, reader)
    return traceback.extract_stack(reader)


def collectives(progress: Progress) -> dict[str, Any]:
    """The fields of a report that torch's flight recorder knows; empty without a recorder or an entry.

    TORCH_FR_BUFFER_SIZE=0 turns it off.
    """
    try:
        entries = recorded()
        entered = by_group(entries, members=process_groups(), phases=[*progress.begun])
    except (AttributeError, RuntimeError, ValueError):  # some builds of torch have no recorder
        return {}
    if not entries:
        return {}
    return {
        "collective": last_collective(entries), "device": device_progress(entries), "entered": entered
    }  # fmt: skip


def last_collective(entries: Sequence[Mapping[str, Any]]) -> Collective:
    """The collective that this process waits in, or the last one that it began.

    A group retires its collectives in order, for each backend. So all later collectives of a group wait for
    its first pending one. A save beside the training may be pending for a long time, so the collectives of
    the training count first.
    """
    pending: dict[tuple[str, str], list[int]] = defaultdict(list)
    for index, entry in enumerate(entries):
        queue = pending[str(entry["process_group"][0]), str(entry["profiling_name"]).partition(":")[0]]
        if entry["retired"]:
            queue.clear()
        else:
            queue.append(index)
    first = sorted(queue[0] for queue in pending.values() if queue)
    of_training = [index for index in first if entries[index]["process_group"][1] != SAVING]
    return collective_of(entries[([*of_training, *first] or [-1])[0]])


def _address_of_store(folder: RunFolder, *, world: World) -> tuple[str, int] | None:
    """Look up rank 0's address now, because the name server may be unreachable after the network fails."""
    published = read_record(Published, Published.path(folder, world))
    if world.rank == 0 or published is None or published.port is None:
        return None
    with contextlib.suppress(OSError):
        addresses = socket.getaddrinfo(published.host, published.port, type=socket.SOCK_STREAM)
        return str(addresses[0][4][0]), int(addresses[0][4][1])
    return None


def meet_hang(store: SignedStore | None, *, world: World, within_s: float) -> bool:
    """Say that this rank has reported, and wait for all ranks. Returns whether all have reported.

    Each rank writes one key, and only rank 0 reads these keys. When it has seen all of them, it writes one
    more, for which the others wait. So N ranks send 3 N requests, however long they wait.

    If the store fails or does not answer, waits for `within_s` seconds, since the others may still report.
    """
    met = threading.Event()

    def meet() -> None:
        assert store is not None
        try:
            if all_reported(store, world=world, until_s=time.monotonic() + within_s):
                met.set()
        except RuntimeError as error:  # DistError or ForgedError
            print(f"the ranks can't meet through the store: {error}", flush=True)

    if store is not None:  # in a thread: a stopped rank 0 accepts connections but never answers
        threading.Thread(target=meet, name="hang meeting", daemon=True).start()
    met.wait(within_s)
    if met.is_set() and world.rank == 0 and world.world_size > 1:
        time.sleep(SERVE_S)
    return met.is_set()


def all_reported(store: SignedStore, *, world: World, until_s: float) -> bool:
    """Write this rank's key and wait for the others until the time `until_s` of the monotonic clock.

    Values carry no information, so none is parsed.
    """
    store.set(_key(world.rank), "")
    keys = [_key(rank) for rank in range(world.world_size)] if world.rank == 0 else [_ALL]
    for key in keys:
        try:
            store.wait([key], timedelta(seconds=max(until_s - time.monotonic(), _LEAST_S)))
        except DistStoreError:
            return False
    if world.rank == 0:
        store.set(_ALL, "")
    return True


def _key(rank: int) -> str:
    return f"hang/reported/{rank}"
