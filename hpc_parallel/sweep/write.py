"""All run folders of a sweep, many at a time: the disk's answers are what takes the time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

from hpc_parallel.launch.prepare import PreparedRun
from hpc_parallel.record.provenance import source_state
from hpc_parallel.record.snapshot import Snapshot

AT_ONCE = 8
T = TypeVar("T")


def write_runs(runs: Sequence[PreparedRun]) -> None:
    """Make every run folder; source that several keep is copied once and then linked.

    Raises ConfigError where one can't be made; the others are taken away again.
    """
    state = cache(source_state)
    taken: list[Snapshot] = []
    written: list[PreparedRun] = []

    def write(run: PreparedRun) -> None:
        same = next((each for each in taken if run.snapshot and each.files is run.snapshot.files), None)
        run.write(taken=same, state=state)
        written.append(run)
        if same is None and run.snapshot is not None:
            taken.append(run.snapshot)

    try:
        first = {id(run.snapshot.files) if run.snapshot else None: run for run in reversed(runs)}
        for run in first.values():
            write(run)
        each_of(write, (run for run in runs if not any(run is one for one in first.values())))
    except BaseException:  # Ctrl-C too
        take_back(written)
        raise


def take_back(runs: Iterable[PreparedRun]) -> None:
    """Undo `write_runs` for those in which nothing began."""
    for run in runs:
        run.take_back()


def each_of(work: Callable[[T], object], items: Iterable[T]) -> None:
    """`work` for every item, some at a time; raises the first error once all have ended."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for done in [pool.submit(work, item) for item in items]:
            done.result()
