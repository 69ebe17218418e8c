"""Finds the source files of a folder that is in no git checkout of this user, if the files are few."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

MOST_FILES = 2_000  # a folder with more files is a home directory or a data set
MOST_BYTES = 2**20  # of a file that is copied; a larger file is data, and the copy has a link to it
EDITS = "later edits change the run"
_CORE_NAME = re.compile(r"core(\.\d+)?")
_ELF_TYPE_END, _ET_CORE = 18, 4
_NO_SOURCE = ("__pycache__", "node_modules")


@dataclass(frozen=True)
class FolderSource:
    """What a folder holds, as paths in it.

    names: files that are copied; links: path -> target of each link that the copy has in place of a file or
    folder;
    unkept: path -> why it is not copied, and what follows, for a message;
    modules: files that git ignores and Python imports, which are copied if they are not too large.
    """

    names: tuple[str, ...] = ()
    links: Mapping[str, str] = field(default_factory=dict)
    unkept: Mapping[Path, str] = field(default_factory=dict)
    modules: tuple[str, ...] = ()


def loose_source(folder: Path, *, most_bytes: int, leave_out: Callable[[Path], bool]) -> FolderSource:
    """Look for the files of `folder`, without hidden ones and virtual environments.

    most_bytes: the limit for all copied files together; leave_out: whether a folder and everything below it
    is no source. A folder without any Python file has no source.
    """
    names: list[str] = []
    for name in walk(folder, leave_out):
        names.append(name)
        if len(names) > MOST_FILES:
            return FolderSource(
                unkept={folder: f"(no git checkout, and more than {MOST_FILES:,} files): {EDITS}"}
            )
    if not any(name.endswith(".py") for name in names):
        return FolderSource()
    sizes = {name: os.stat(folder / name).st_size for name in names}
    small = tuple(name for name, size in sizes.items() if size <= MOST_BYTES)
    if (total := sum(sizes[name] for name in small)) > most_bytes:
        return FolderSource(
            unkept={folder: f"(no git checkout, and {total / 2**20:.0f} MiB of files): {EDITS}"}
        )
    links = {name: str(folder / name) for name, size in sizes.items() if size > MOST_BYTES}
    return FolderSource(small, links)


def is_core_file(path: str | Path) -> bool:
    """Whether `path` is a core dump: the memory of an aborted process, which the kernel wrote.

    A core dump is an ELF file of type 4 (man 5 elf) with the name `core` or `core.PID` (man 5 core).
    """
    if not _CORE_NAME.fullmatch(os.path.basename(path)):
        return False
    try:
        with open(path, "rb") as file:
            head = file.read(_ELF_TYPE_END)
    except OSError:
        return False
    return head[:4] == b"\x7fELF" and _ET_CORE in head[_ELF_TYPE_END - 2 :]


def walk(folder: Path, leave_out: Callable[[Path], bool]) -> Iterator[str]:
    """Yield the files of a folder as paths in it, without hidden ones and folders that are no source."""
    for place, folders, files in os.walk(folder):
        here = Path(place)
        folders[:] = sorted(
            name for name in folders if not is_no_source(here / name) and not leave_out(here / name)
        )
        yield from (
            str((here / name).relative_to(folder))
            for name in sorted(files)
            if not name.startswith(".") and (here / name).is_file() and not is_core_file(here / name)
        )


def is_no_source(folder: Path) -> bool:
    """Whether a folder is hidden, a cache, or a virtual environment."""
    return folder.name.startswith(".") or folder.name in _NO_SOURCE or (folder / "pyvenv.cfg").exists()
