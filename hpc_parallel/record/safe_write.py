"""Write files in folders where other users may have put links or files of the same name.

The package writes every file with this module. It creates a file with an unpredictable new name (O_EXCL) and
then renames it. A rename replaces a link and never follows it. tests/security/test_writers.py finds code that
bypasses this module.
"""

from __future__ import annotations

import json
import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO


@contextmanager
def replacing(path: Path, *, mode: int = 0o600) -> Iterator[BinaryIO]:
    """Open a new binary file that replaces `path` atomically if the block ends without an error.

    A reader sees the old content or the new, never a part. While the file is written, only this user can
    access it. Before the rename, the file gets `mode` without the bits of the process's umask.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if mode != 0o600:
                os.fchmod(file.fileno(), mode & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_bytes(path: Path, content: bytes, *, mode: int = 0o600) -> None:
    """Replace the content of `path` atomically."""
    with replacing(path, mode=mode) as file:
        file.write(content)


def write_text(path: Path, text: str, *, mode: int = 0o600) -> None:
    """Replace the content of `path` atomically, as UTF-8."""
    write_bytes(path, text.encode(), mode=mode)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace the content of `path` atomically, as JSON."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def map_pages(path: Path, size: int) -> mmap.mmap:
    """Map a file of `size` bytes for reading and writing. A file that has this size keeps its content.

    Raises OSError if there is no room: writing to a page that is not there would end the process.
    """
    with suppress(FileNotFoundError):
        handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if os.fstat(handle).st_size == size:
                return mmap.mmap(handle, size)
        finally:
            os.close(handle)
        path.unlink()  # first: there may not be room for both
    with replacing(path) as file:
        os.posix_fallocate(file.fileno(), 0, size)
        return mmap.mmap(file.fileno(), size)


def open_append(path: Path) -> int:
    """A descriptor that appends to `path`; only this user can access a new file.

    Raises OSError if `path` is a link: its target could be any file of this user.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.open(path, flags, 0o600)


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """Append one JSON object in one write, so that a reader never sees a partial line before a whole one."""
    handle = open_append(path)
    try:
        text = (json.dumps(line) + "\n").encode()
        while text:  # a full disk accepts a part and then raises
            text = text[os.write(handle, text) :]
    finally:
        os.close(handle)


def _umask() -> int:
    """The process's umask, read from /proc because os.umask would change it briefly for other threads."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o077
