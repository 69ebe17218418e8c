"""A full file system for tests."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_MNT_DETACH = 2


@contextmanager
def small_disk(path: Path, *, bytes_: int) -> Iterator[Path]:
    """A file system of `bytes_` bytes at `path`; skips the test if this user can't mount one."""
    libc = ctypes.CDLL(None, use_errno=True)
    path.mkdir()
    options = f"size={bytes_}".encode()
    if libc.mount(b"none", os.fsencode(path), b"tmpfs", 0, options) != 0:
        pytest.skip(f"no small file system can be mounted here: {os.strerror(ctypes.get_errno())}")
    try:
        yield path
    finally:
        libc.umount2(os.fsencode(path), _MNT_DETACH)


def fill(path: Path) -> None:
    """Fill the file system completely."""
    try:
        with (path / "filler").open("wb", buffering=0) as file:
            while file.write(b"\0" * 4096):
                pass
    except OSError:
        pass
