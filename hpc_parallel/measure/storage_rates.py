"""The rates of the storage, of GPUDirect Storage, and of copies between a host and its device.

`task=preflight` measures whether input scales with the processes that read. `task=calibrate` measures the
rates that a plan of checkpoints and input needs.

NVIDIA's kvikio reads a file into device memory and uses GPUDirect Storage where it can. It reads through
host memory if it does not find the library cuFile, or if cuFile falls back (cuFile API Reference,
"Compatibility Mode"). If its rates can't be measured, a sentence says why, and the run goes on.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import random
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_parallel.planning.hardware import Storage
from hpc_parallel.profiling.links import fastest_s
from hpc_parallel.record.recorded_preflight import DirectReads, listed_hosts
from hpc_parallel.start.start_checks import PreflightError
from hpc_parallel.strategies import exchange
from hpc_parallel.strategies.exchange import FollowerError
from hpc_parallel.worker.time_budget import TimeBudget, advice

BLOCK_BYTES = 2**22
COPIED_BYTES = 2**28
STATISTICS = Path("/proc/driver/nvidia-fs/stats")
COMPARED_BYTES = 2**20
FILE_BYTES = 2**26  # of each rank
PIECE_BYTES, PIECES = 2**14, 256  # the pieces to read, in places that no read-ahead can guess
STORAGE_S = 5.0  # about the time that a slow disk needs


class ReadingError(RuntimeError):
    """A rank can't write or read its file. Raised on all ranks."""


def copy_rates(device: torch.device) -> dict[str, float]:
    """Bytes per second between the host and the device, of pinned and of pageable memory; empty on CPUs."""
    if device.type == "cpu":
        return {}
    rates = {}
    on_device = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device)
    for name in ("pinned", "pageable"):
        on_host = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=name == "pinned")
        to_device = partial(on_device.copy_, on_host, non_blocking=True)
        to_host = partial(on_host.copy_, on_device, non_blocking=True)
        rates[f"{name}_bytes_per_s"] = COPIED_BYTES / fastest_s(to_device, device=device)
        rates[f"{name}_to_host_bytes_per_s"] = COPIED_BYTES / fastest_s(to_host, device=device)
    return rates


def read_rates(
    storage: Path,
    *,
    names: Sequence[str],
    size_bytes: int,
    device: torch.device,
    is_late: Callable[[], bool] = lambda: False,
) -> tuple[dict[str, dict[str, float]], DirectReads]:
    """The rates of `rates_by_readers`, and the rates into device memory of `direct_rates`.

    Each rank reads a file of its own, which is not in the page cache. A collective call.

    names: host of each rank; is_late: whether larger numbers of processes are left out, a collective call.
    Raises PreflightError, FollowerError and ReadingError.
    """
    read_bytes = size_bytes // BLOCK_BYTES * BLOCK_BYTES
    with opened_file(
        storage, names=names, size_bytes=read_bytes, is_named=not kvikio_problem(device)
    ) as file:
        read = partial(read_s, file.fileno(), where=f"{names[dist.get_rank()]}: {storage}")
        reads = rates_by_readers(read, names=names, size_bytes=read_bytes, is_late=is_late)
        return reads, direct_rates(Path(str(file.name)), names=names, size_bytes=read_bytes, device=device)


@contextmanager
def opened_file(
    storage: Path, *, names: Sequence[str], size_bytes: int, is_named: bool
) -> Iterator[IO[bytes]]:
    """A new file with random content on each rank; a collective call.

    names: host of each rank; is_named: whether the file has a name, which kvikio needs to open it. A file
    without a name disappears even if this process is killed.

    Raises PreflightError on the hosts where a file can't be written, and FollowerError on the others.
    """
    with ExitStack() as stack:
        error = None
        try:
            create = tempfile.NamedTemporaryFile if is_named else tempfile.TemporaryFile
            file: IO[bytes] = stack.enter_context(create(dir=storage))
            for _ in range(size_bytes // BLOCK_BYTES):
                file.write(os.urandom(BLOCK_BYTES))
            file.flush()
            os.fsync(file.fileno())
        except OSError as problem:
            error = problem.strerror or str(problem)
        raise_storage_errors(storage, names=names, errors=exchange.all_gather(error))
        yield file


def raise_storage_errors(storage: Path, *, names: Sequence[str], errors: Sequence[str | None]) -> None:
    """Raise the error of the first rank that has an error. The message names all hosts with an error.

    names, errors: the host and the error of each rank.
    """
    failed = {name: error for name, error in zip(names, errors, strict=True) if error is not None}
    if failed:
        first = next(iter(failed.values()))
        message = f"{listed_hosts(list(failed))}: can't write to {storage}: {first}"
        if names[dist.get_rank()] not in failed:
            raise FollowerError(f"ended with {message}")
        raise PreflightError(f"{message}. Try another task.storage", exclude=())


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
        _raise_first_error(times)
        for host in table:
            slowest_s = max(time_s for time_s, name in zip(times, names, strict=True) if name == host)
            count = min(readers, names.count(host))
            table[host][str(count)] = count * size_bytes / slowest_s
    return table


def powers(most: int) -> list[int]:
    """1, 2, 4, ... and `most`."""
    return sorted({*(2**power for power in range(most.bit_length())), most})


def read_s(file: int, *, where: str) -> float | str:
    """The seconds to read a file from the storage, or the error and where it was."""
    try:
        _drop_cached(file)
        os.lseek(file, 0, os.SEEK_SET)
        started = time.perf_counter()
        while os.read(file, BLOCK_BYTES):
            pass
        return time.perf_counter() - started
    except OSError as error:
        return f"{where}: {error.strerror or error}"


def _drop_cached(file: int) -> None:
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def _raise_first_error(results: Sequence[object]) -> None:
    if errors := [result for result in results if isinstance(result, str)]:
        raise ReadingError(errors[0])


@dataclass(frozen=True)
class DirectReader:
    """Reads the whole file at `path` into `buffer`, a tensor of bytes on the device."""

    kvikio: Any
    path: Path
    buffer: Tensor

    def read_s(self) -> float | str:
        """The seconds to read the file from the storage, or the error."""
        try:
            with self.path.open("rb") as file:  # in its compatibility mode kvikio uses the page cache
                _drop_cached(file.fileno())
            started = time.perf_counter()
            with self.kvikio.CuFile(str(self.path), "r") as file:
                count = file.read(self.buffer)
            if self.buffer.device.type == "cuda":
                torch.cuda.synchronize(self.buffer.device)
            took_s = time.perf_counter() - started
            return took_s if count == len(self.buffer) else f"kvikio read {count} of {len(self.buffer)} bytes"
        except Exception as error:  # kvikio raises RuntimeError, OSError, ...
            return one_line(error)

    def first_error(self) -> str | None:
        """The error of a first read, which opens the driver, or wrong first bytes; None if all is right."""
        seconds_or_error = self.read_s()
        if isinstance(seconds_or_error, str):
            return seconds_or_error
        expected = torch.frombuffer(bytearray(self.path.open("rb").read(COMPARED_BYTES)), dtype=torch.uint8)
        is_right = torch.equal(self.buffer[: len(expected)].cpu(), expected)
        return None if is_right else "kvikio read wrong bytes"


def direct_rates(path: Path, *, names: Sequence[str], size_bytes: int, device: torch.device) -> DirectReads:
    """The rates (see `rates_by_readers`), or why there are none.

    A collective call. path: this rank's file of `size_bytes`; names: host of each rank.
    """
    reader = open_reader(path, size_bytes=size_bytes, device=device)
    reason = reader if isinstance(reader, str) else reader.first_error()
    if reasons := [text for text in exchange.all_gather(reason) if text is not None]:
        return DirectReads(not_measured=reasons[0])
    assert isinstance(reader, DirectReader)
    before = counted_reads()
    try:
        rates = rates_by_readers(reader.read_s, names=names, size_bytes=size_bytes)
    except ReadingError as error:  # raised on all ranks
        return DirectReads(not_measured=str(error))
    after = counted_reads()
    counted = None if before is None or after is None else after - before
    modes = exchange.all_gather(direct_mode(reader.kvikio, counted=counted))
    return DirectReads(rates, mode="; ".join(dict.fromkeys(modes)))


def open_reader(path: Path, *, size_bytes: int, device: torch.device) -> DirectReader | str:
    """The reader, or why there is none."""
    if (reason := kvikio_problem(device)) is not None:
        return reason
    try:
        kvikio = importlib.import_module("kvikio")
        return DirectReader(kvikio, path, torch.zeros(size_bytes, dtype=torch.uint8, device=device))
    except Exception as error:  # a broken installation; no memory on the device
        return one_line(error)


def kvikio_problem(device: torch.device) -> str | None:
    """Why kvikio can't read into the device; None if nothing is missing."""
    if device.type == "cpu":
        return "no GPU"
    return None if importlib.util.find_spec("kvikio") else "kvikio is not installed"


def direct_mode(kvikio: Any, *, counted: int | None) -> str:
    """Whether the reads used GPUDirect Storage.

    counted: reads on this host that the driver nvidia-fs counted during them; None if it does not count.
    """
    try:
        defaults = importlib.import_module("kvikio.defaults")
        driver = importlib.import_module("kvikio.cufile_driver")
        if defaults.is_compat_mode_preferred():
            return "compatibility mode of kvikio, which uses no cuFile"
        if not driver.get("is_gds_available"):
            return "compatibility mode of cuFile, because the driver nvidia-fs is not loaded"
    except Exception as error:  # other names in another version
        return f"unknown whether in compatibility mode: kvikio {kvikio.__version__}, {one_line(error)}"
    if counted is None:
        return "used, as cuFile says; the driver nvidia-fs does not count reads here"
    return "used" if counted else "compatibility mode of cuFile: the driver nvidia-fs counted no reads"


def counted_reads(path: Path = STATISTICS) -> int | None:
    """The reads that nvidia-fs has counted on this host; None if it is not loaded or does not count them."""
    try:
        content = path.read_text(errors="replace")
    except OSError:
        return None
    match = re.search(r"^Reads\s*: n=(\d+)", content, re.MULTILINE)
    return None if match is None else int(match[1])


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


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
        except ReadingError as error:
            self.left_out = f"left out: the storage: {error}"
            return
        rates = {"written": self.storage.together_bytes_per_s, "read": self.storage.read_bytes_per_s}
        yield ["storage".ljust(18), *(f"{name} {gigabytes(rate)}" for name, rate in rates.items())]


def gigabytes(rate: float | None) -> str:
    """`1.234 GB/s`."""
    return f"{(rate or 0.0) / 1e9:.3f} GB/s"


def storage_rates(folder: Path, *, device: torch.device) -> Storage:
    """Each rank writes a file and reads pieces of it, at the same time as all others. A collective call.

    The slowest rank counts. Raises ReadingError.
    """
    ranks, copied = dist.get_world_size(), copy_rates(device).get("pinned_to_host_bytes_per_s")
    times = exchange.all_gather(_file_times(folder))
    _raise_first_error(times)
    written_s, read_s = map(max, zip(*times, strict=True))
    copied_s = None if copied is None else exchange.all_gather(copied)
    return Storage(
        write_bytes_per_s=FILE_BYTES / written_s,
        together_bytes_per_s=ranks * FILE_BYTES / written_s,
        read_bytes_per_s=PIECES * PIECE_BYTES / read_s,
        copy_bytes_per_s=None if copied_s is None else min(copied_s),
    )


def _file_times(folder: Path) -> tuple[float, float] | str:
    """Seconds to write a file to the disk and to read pieces of it, or the error."""
    block = os.urandom(BLOCK_BYTES)
    places = random.Random(0).sample(range(FILE_BYTES // PIECE_BYTES), PIECES)
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            began = time.perf_counter()
            for _ in range(FILE_BYTES // len(block)):
                file.write(block)
            os.fsync(file.fileno())
            written_s = time.perf_counter() - began
            _drop_cached(file.fileno())
            began = time.perf_counter()
            for place in places:
                os.pread(file.fileno(), PIECE_BYTES, place * PIECE_BYTES)
            return written_s, time.perf_counter() - began
    except OSError as error:
        return f"{folder}: {error.strerror or error}"
