"""The rates of the storage under a run folder, for plans of checkpoints and of input."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist

from hpc_parallel.measure.preflight_task import copy_rates
from hpc_parallel.measure.read_scaling import BLOCK_BYTES
from hpc_parallel.planning.hardware import Storage
from hpc_parallel.strategies import exchange
from hpc_parallel.worker.time_budget import TimeBudget, advice

FILE_BYTES = 2**26  # of each rank
PIECE_BYTES, PIECES = 2**14, 256  # the pieces to read, in places that no read-ahead can guess
STORAGE_S = 5.0  # about the time that a slow disk needs


class StorageError(RuntimeError):
    """A rank can't write or read a file. Raised on all ranks."""


class StorageRow:
    """The rates, once they are measured. left_out: why they are not measured."""

    def __init__(self, folder: Path, *, device: torch.device) -> None:
        self._folder, self._device = folder, device
        self.storage = Storage()
        self.left_out: str | None = None

    def measure(self, budget: TimeBudget) -> Iterator[list[str]]:
        """Yields the cells of a row for the screen, unless the time is used or a rank has an error."""
        if budget.left_s() < 0:
            self.left_out = f"left out: the storage: {advice(budget, needed_s=STORAGE_S)}"
            return
        try:
            self.storage = storage_rates(self._folder, device=self._device)
        except StorageError as error:
            self.left_out = f"left out: the storage: {error}"
            return
        rates = {"written": self.storage.together_bytes_per_s, "read": self.storage.read_bytes_per_s}
        yield ["storage".ljust(18), *(f"{name} {gigabytes(rate)}" for name, rate in rates.items())]


def gigabytes(rate: float | None) -> str:
    """`1.234 GB/s`."""
    return f"{(rate or 0.0) / 1e9:.3f} GB/s"


def storage_rates(folder: Path, *, device: torch.device) -> Storage:
    """Each rank writes a file and reads pieces of it, at the same time as all others. A collective call.

    The slowest rank counts. Raises StorageError.
    """
    ranks, copied = dist.get_world_size(), copy_rates(device).get("pinned_to_host_bytes_per_s")
    written_s, read_s = _slowest(_file_times(folder))
    copied_s = None if copied is None else exchange.all_gather(copied)
    return Storage(
        write_bytes_per_s=FILE_BYTES / written_s,
        together_bytes_per_s=ranks * FILE_BYTES / written_s,
        read_bytes_per_s=PIECES * PIECE_BYTES / read_s,
        copy_bytes_per_s=None if copied_s is None else min(copied_s),
    )


def _slowest(times: tuple[float, float] | str) -> tuple[float, float]:
    """The slowest times of all ranks. Raises StorageError with the first rank's error."""
    by_rank = exchange.all_gather(times)
    if errors := [error for error in by_rank if isinstance(error, str)]:
        raise StorageError(errors[0])
    return max(written_s for written_s, _ in by_rank), max(read_s for _, read_s in by_rank)


def _file_times(folder: Path) -> tuple[float, float] | str:
    """Seconds to write a file to the disk and to read pieces of it, or the error."""
    block = os.urandom(BLOCK_BYTES)
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            return _written_s(file, block), _read_s(file)
    except OSError as error:
        return f"{folder}: {error.strerror or error}"


def _written_s(file: IO[bytes], block: bytes) -> float:
    began = time.perf_counter()
    for _ in range(FILE_BYTES // len(block)):
        file.write(block)
    os.fsync(file.fileno())
    return time.perf_counter() - began


def _read_s(file: IO[bytes]) -> float:
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # drops it from the page cache
    places = random.Random(0).sample(range(FILE_BYTES // PIECE_BYTES), PIECES)
    began = time.perf_counter()
    for place in places:
        os.pread(file.fileno(), PIECE_BYTES, place * PIECE_BYTES)
    return time.perf_counter() - began
