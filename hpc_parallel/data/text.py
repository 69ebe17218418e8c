"""Real text on every machine without a download: the bytes of source files."""

from __future__ import annotations

import fnmatch
import hashlib
import os
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_parallel.record.safe_read import is_foreign_link, open_regular

if TYPE_CHECKING:
    from hpc_parallel.data.windows import Windows

VOCAB_SIZE = 256
# Of the standard library: what is no library source, or is a table in a source file's clothes.
LEFT_OUT = {
    "site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo",
    "ensurepip", "encodings", "pydoc_data", "__pycache__", "__phello__",
}  # fmt: skip


class TextData:
    """The bytes of the files below `path` that match `pattern`, one after the other by name.

    `path` null is the standard library of this Python. Whole files are held out for validation, by a
    hash of their name alone, so which ones they are doesn't change with the rest; of a single file,
    the end is held out.

    Raises ValueError where there is no file or too little text.
    """

    vocab_size = VOCAB_SIZE
    train: Windows
    validation: Windows

    def __init__(
        self,
        *,
        path: str | None = None,
        pattern: str = "*.py",
        sequence_length: int = 128,
        max_bytes: int = 6_000_000,
        validation_share: float = 0.05,
    ) -> None:
        import numpy as np  # here, since the login node asks for find_files alone

        from hpc_parallel.data.windows import Windows

        files = find_files(path, pattern=pattern)
        texts: dict[str, bytes] = {}
        left = max_bytes
        for name, file in files.items():
            if left <= 0:
                break
            with open_regular(file, follow=True) as stream:
                texts[name] = stream.read(left)
            left -= len(texts[name])
        train, validation = split(texts, share=validation_share)
        self.sequence_length = sequence_length
        self.sample_shape = (sequence_length,)
        self.digest = hashlib.sha256(b"%d:" % len(train) + train + validation).hexdigest()
        self.train, self.validation = (
            Windows(np.frombuffer(part, dtype=np.uint8), sequence_length, VOCAB_SIZE, name)
            for part, name in ((train, "training"), (validation, "validation"))
        )


def find_files(path: str | None, *, pattern: str) -> dict[str, Path]:
    """Files by their name relative to the folder, in the order of these names."""
    root = Path(sysconfig.get_path("stdlib") if path is None else os.path.expanduser(path))
    if os.path.isfile(root):
        return {root.name: root}
    found: dict[str, Path] = {}
    for folder, below, names in os.walk(root):
        if path is None:
            below[:] = [name for name in below if name not in LEFT_OUT]  # not walked: may hold all of conda
        files = (Path(folder, name) for name in fnmatch.filter(names, pattern))
        found |= {
            file.relative_to(root).as_posix(): file
            for file in files
            if os.path.isfile(file) and not is_foreign_link(file)
        }
    if not found:
        raise ValueError(
            f"no file matches data.pattern = {pattern} in {root}: data.path names a folder of text files, "
            "and data.pattern their names"
        )
    return dict(sorted(found.items()))


def split(texts: dict[str, bytes], *, share: float) -> tuple[bytes, bytes]:
    """Training and validation bytes; files whose name hashes lowest are held out, at least one."""
    if len(texts) == 1:
        (text,) = texts.values()
        cut = round(len(text) * (1 - share))
        return text[:cut], text[cut:]
    fractions = {name: name_fraction(name) for name in texts}
    limit = max(share, min(fractions.values()))
    held_out = {name for name, fraction in fractions.items() if fraction <= limit}
    train = b"".join(text for name, text in texts.items() if name not in held_out)
    return train, b"".join(text for name, text in texts.items() if name in held_out)


def name_fraction(name: str) -> float:
    """A number in [0, 1) that depends on the name only and is spread evenly over names."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48
