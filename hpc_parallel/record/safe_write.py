"""Write files in folders where other users may have put links or files of the same name.

Every file of the package is written here: under an unpredictable name that did not exist (O_EXCL), then
renamed. A rename replaces a link and never follows it. tests/security/test_writers.py finds code that
bypasses this module.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


@contextmanager
def replacing(path: Path, *, mode: int = 0o600) -> Iterator[BinaryIO]:
    """A new binary file that takes the place of `path` in one move when the block ends without an error.

    A reader sees the old content or the new, never a part. The file is readable and writable at first by
    this user alone, and gets `mode` less the process's umask before the move.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    beside = Path(name)
    try:
        with os.fdopen(handle, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if mode != 0o600:
                os.fchmod(file.fileno(), mode & ~_umask())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def write_bytes(path: Path, content: bytes, *, mode: int = 0o600) -> None:
    """Replace `path` in one move."""
    with replacing(path, mode=mode) as file:
        file.write(content)


def write_text(path: Path, text: str, *, mode: int = 0o600) -> None:
    """Replace `path` in one move, as UTF-8."""
    write_bytes(path, text.encode(), mode=mode)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def open_append(path: Path) -> int:
    """A descriptor that appends to `path`, made for this user alone if it is new.

    Raises OSError if `path` is a link: its target could be any file of this user.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return os.open(path, flags, 0o600)


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """One JSON object in one write, so that a reader never sees half of it with a whole line behind."""
    handle = open_append(path)
    try:
        text = (json.dumps(line) + "\n").encode()
        while text:  # a full disk takes a part, and then raises
            text = text[os.write(handle, text) :]
    finally:
        os.close(handle)


def _umask() -> int:
    """Linux tells it without setting it; os.umask would change it for other threads in between."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o077
