"""Measures whether input scales with devices: 1, 2, 4, ... processes of each host read together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence

import torch.distributed as dist

from hpc_parallel.strategies import exchange

BLOCK_BYTES = 2**22


class ReadingError(RuntimeError):
    """A process could not read its file. Raised on all ranks."""


def rates_by_readers(
    read_s: Callable[[], float | str],
    *,
    names: Sequence[str],
    size_bytes: int,
    is_late: Callable[[], bool] = lambda: False,
) -> dict[str, dict[str, float]]:
    """Host -> number of processes that read at the same time -> bytes per second of all of them.

    A collective call. read_s: reads this rank's file of `size_bytes`, and returns seconds or an error; names:
    host of each rank; is_late: whether larger numbers of processes are left out, a collective call. Raises
    ReadingError.
    """
    rank = dist.get_rank()
    place = sum(host == names[rank] for host in names[:rank])  # among the ranks of this host
    most = max(names.count(host) for host in names)
    table: dict[str, dict[str, float]] = {host: {} for host in dict.fromkeys(names)}
    for readers in powers(most):
        if readers > 1 and is_late():
            break
        dist.barrier()
        times = exchange.all_gather(read_s() if place < readers else 0.0)
        if errors := [error for error in times if isinstance(error, str)]:
            raise ReadingError(errors[0])
        for host in table:
            slowest_s = max(time_s for time_s, name in zip(times, names, strict=True) if name == host)
            count = min(readers, names.count(host))
            table[host][str(count)] = count * size_bytes / slowest_s
    return table


def powers(most: int) -> Iterator[int]:
    """Yields 1, 2, 4, ... and `most`."""
    count = 1
    while count < most:
        yield count
        count *= 2
    yield most


def read_s(file: int) -> float:
    """The seconds to read a file from the storage."""
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)  # drops it from the page cache
    os.lseek(file, 0, os.SEEK_SET)
    started = time.perf_counter()
    while os.read(file, BLOCK_BYTES):
        pass
    return time.perf_counter() - started
