"""Read a file into device memory with NVIDIA's kvikio, which uses GPUDirect Storage where it can.

kvikio reads through host memory if it does not find the library cuFile, or if cuFile falls back (cuFile API
Reference, "Compatibility Mode"). Nothing in this module fails a run: if the rates can't be measured, a
sentence says why.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpc_parallel.measure.read_scaling import ReadingError, rates_by_readers
from hpc_parallel.record.machine_check_table import DirectReads
from hpc_parallel.strategies import exchange

STATISTICS = Path("/proc/driver/nvidia-fs/stats")
COMPARED_BYTES = 2**20


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
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
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
    modes = exchange.all_gather(mode(reader.kvikio, counted=counted))
    return DirectReads(rates, mode="; ".join(dict.fromkeys(modes)))


def open_reader(path: Path, *, size_bytes: int, device: torch.device) -> DirectReader | str:
    """The reader, or why there is none."""
    if (reason := missing(device)) is not None:
        return reason
    try:
        kvikio = importlib.import_module("kvikio")
        return DirectReader(kvikio, path, torch.zeros(size_bytes, dtype=torch.uint8, device=device))
    except Exception as error:  # a broken installation; no memory on the device
        return one_line(error)


def missing(device: torch.device) -> str | None:
    """Why kvikio can't read into the device; None if nothing is missing."""
    if device.type == "cpu":
        return "no GPU"
    return None if importlib.util.find_spec("kvikio") else "kvikio is not installed"


def mode(kvikio: Any, *, counted: int | None) -> str:
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
