"""Write all run folders of a sweep, several at a time, because most of the time is waiting for the disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

from hpc_parallel.launch import run_files
from hpc_parallel.launch.prepare import PreparedRun
from hpc_parallel.record.provenance import source_state
from hpc_parallel.record.snapshot import Snapshot

MAX_THREADS = 8
T = TypeVar("T")


def write_runs(runs: Sequence[PreparedRun]) -> None:
    """Create every run folder. Source that several runs keep is copied once and then hard-linked.

    Raises ConfigError if a folder can't be created. Then the other folders are removed.
    """
    state = cache(source_state)
    snapshots: list[Snapshot] = []  # already copied
    written: list[PreparedRun] = []

    def write(run: PreparedRun) -> None:
        files = run.snapshot.files if run.snapshot else None
        copied = next((snapshot for snapshot in snapshots if snapshot.files is files), None)
        run_files.write(run, copied=copied, git_state=state)
        written.append(run)
        if copied is None and run.snapshot is not None:
            snapshots.append(run.snapshot)

    try:
        first = {id(run.snapshot.files) if run.snapshot else None: run for run in reversed(runs)}
        for run in first.values():
            write(run)
        others = (run for run in runs if not any(run is other for other in first.values()))
        for_each(write, others)
    except BaseException:  # Ctrl-C too
        take_back(written)
        raise


def take_back(runs: Iterable[PreparedRun]) -> None:
    """Undo `write_runs` for runs that have not started."""
    for run in runs:
        run_files.undo_write(run)


def for_each(work: Callable[[T], object], items: Iterable[T]) -> None:
    """Call `work` for every item in threads; after all have ended, raise the first error."""
    with ThreadPoolExecutor(MAX_THREADS) as pool:
        for future in [pool.submit(work, item) for item in items]:
            future.result()
