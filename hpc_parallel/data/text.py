"""Text data that needs no download: the bytes of source files."""

from __future__ import annotations

import codecs
import hashlib
import os
import sysconfig
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_parallel.data.folder_files import FolderFiles, list_files, name_matcher, walk_files
from hpc_parallel.problems import as_override
from hpc_parallel.record.safe_read import DamagedError, open_regular

if TYPE_CHECKING:
    from hpc_parallel.data.windows import Windows

VOCAB_SIZE = 256
_MOST_EXAMPLES = 1000  # files whose names are looked at for a suggestion
# Folders of the standard library that are not library code, or whose source files are mostly tables.
LEFT_OUT = {
    "site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo",
    "ensurepip", "encodings", "pydoc_data", "__pycache__", "__phello__",
}  # fmt: skip


class TextData:
    """The bytes of the files below `path` that match `pattern`, concatenated in the order of their names.

    If `path` is null, the text is Python's standard library. Validation has entire files, chosen by a hash of
    their names only, so the choice does not depend on the other files. If there is only one file, validation
    has the end of the file.

    Raises ValueError if there is no file or too little text.
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
        import numpy as np  # not at module level: the login node needs find_files only

        from hpc_parallel.data.windows import Windows

        files = find_files(path, pattern=pattern).matching
        texts: dict[str, bytes] = {}
        remaining_bytes = max_bytes
        for name, file in files.items():
            if remaining_bytes <= 0:
                break
            with open_regular(file, follow=True) as stream:
                texts[name] = stream.read(remaining_bytes)
            remaining_bytes -= len(texts[name])
        train, validation = split(texts, share=validation_share)
        self.sequence_length = sequence_length
        self.sample_shape = (sequence_length,)
        digest = hashlib.sha256(b"%d:" % len(train))
        for part in (train, validation):
            digest.update(part)
        self.digest = digest.hexdigest()
        self.train, self.validation = (
            Windows(np.frombuffer(part, dtype=np.uint8), sequence_length, VOCAB_SIZE, name)
            for part, name in ((train, "training"), (validation, "validation"))
        )


def find_files(path: str | None, *, pattern: str) -> FolderFiles:
    """Lists the files below `path`, which may also be one file.

    Raises ValueError if no file matches, or if data can't be read.
    """
    root = Path(sysconfig.get_path("stdlib") if path is None else os.path.expanduser(path))
    skipped = LEFT_OUT if path is None else ()  # site-packages may be all of conda
    found = list_files(root, matches=name_matcher(pattern), skipped=skipped)
    if path is not None:
        found.require()
    if not found.matching:
        hint = "It must be a text file or a folder of text files."
        if usual := usual_pattern(root):
            hint = f"Try {as_override('data.pattern', usual)}."
        raise ValueError(f"no file matches data.pattern = {pattern} in {root}. {hint}")
    return found


def usual_pattern(folder: Path) -> str | None:
    """The pattern for the most frequent suffix in a folder; None if files with this suffix are not text."""
    examples: dict[str, Path] = {}
    counts: Counter[str] = Counter()
    walk = walk_files(folder, matches=lambda file: False, problems=[])
    for example in islice(walk, _MOST_EXAMPLES):
        if example.suffix and not example.name.startswith("."):
            examples.setdefault(example.suffix, example)
            counts[example.suffix] += 1
    if not counts:
        return None
    suffix = counts.most_common(1)[0][0]
    try:
        with open_regular(examples[suffix], follow=True) as file:
            head = file.read(4096)
        codecs.getincrementaldecoder("utf-8")().decode(head)  # the head may end inside a character
    except (OSError, DamagedError, UnicodeDecodeError):
        return None
    return None if b"\0" in head else f"*{suffix}"


def split(texts: dict[str, bytes], *, share: float) -> tuple[bytes, bytes]:
    """Returns training and validation bytes; the files with the lowest hashes are held out, at least one."""
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
    """A uniformly distributed number in [0, 1) that depends on the name only."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48
