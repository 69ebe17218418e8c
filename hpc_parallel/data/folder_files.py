"""The files below a folder of data; `tokenize`, `data=text` and `data=parquet` list them with this function.

Links are followed, because the user has named the folder as data.
"""

from __future__ import annotations

import os
import stat
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath

from hpc_parallel.record.safe_read import is_foreign_link
from hpc_parallel.record.trust import owner_name

_MOST_SUFFIXES = 3  # that are named in a sentence


@dataclass(frozen=True)
class FolderFiles:
    """The files that match, by their names relative to the folder, and what is left out.

    others: the number of files that don't match, by suffix. problems: sentences about data that can't be
    read.
    """

    matching: dict[str, Path]
    others: Counter[str]
    problems: list[str]

    def require(self) -> None:
        """Raise ValueError if data can't be read."""
        if self.problems:
            more = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
            raise ValueError(f"{self.problems[0]}{more}")

    def left_out(self, rule: str) -> str | None:
        """A sentence about the files that don't match; None if there are none."""
        if not (count := self.others.total()):
            return None
        kinds = [f"{number:,} {suffix}" for suffix, number in self.others.most_common(_MOST_SUFFIXES)]
        kinds += ["others"] * (len(self.others) > _MOST_SUFFIXES)
        files = "1 file does" if count == 1 else f"{count:,} files do"
        return f"{files} not match {rule} and {'is' if count == 1 else 'are'} left out: {', '.join(kinds)}."


def list_files(root: Path, *, matches: Callable[[Path], bool], skipped: Collection[str] = ()) -> FolderFiles:
    """List the regular files below `root`, or `root` itself if it is a file, whatever its name.

    Folders whose names are `skipped` are not entered.
    """
    matching: dict[str, Path] = {}
    others: Counter[str] = Counter()
    problems: list[str] = []
    is_file = os.path.isfile(root)
    walk = [root] if is_file else walk_files(root, skipped=skipped, matches=matches, problems=problems)
    for file in walk:
        if not is_file and not matches(file):
            others[file.suffix or "without a suffix"] += 1
        elif os.access(file, os.R_OK):
            matching[file.name if is_file else file.relative_to(root).as_posix()] = file
        else:
            problems.append(f"{file} can't be read: you have no permission")
    return FolderFiles(dict(sorted(matching.items())), others, problems)


def name_matcher(pattern: str) -> Callable[[Path], bool]:
    """Whether the name of a file, or the end of its path, matches a pattern such as `*.txt`.

    Raises ValueError for a pattern that nothing can match.
    """
    end = pattern.removeprefix("**/")
    if "**" in PurePath(end).parts:
        raise ValueError("** can only stand at its begin; all subfolders are searched without it")
    PurePath().match(end)  # raises ValueError for an empty pattern
    return lambda file: file.match(end)


def walk_files(
    root: Path, *, matches: Callable[[Path], bool], problems: list[str], skipped: Collection[str] = ()
) -> Iterator[Path]:
    """Yields the regular files below `root`, in the same order on every host.

    The target of a link comes after the files that are no links, and only if it is not one of them. A link
    that leads nowhere is a problem if it matches or may lead to a folder.
    """
    seen: set[tuple[int, int]] = set()  # folders and files that are no links, or targets of links
    folders, links = [root], deque[Path]()
    file_links: list[tuple[Path, tuple[int, int]]] = []
    while folders or links:
        device, entries = _entries(folders.pop() if folders else links.popleft(), seen, problems)
        below = []
        for entry in entries:
            path = Path(entry.path)
            if entry.is_symlink():
                status = _target(path, problems, is_data=matches(path))
                if status is None:
                    continue
                if stat.S_ISDIR(status.st_mode) and entry.name not in skipped:
                    links.append(path)
                elif stat.S_ISREG(status.st_mode):
                    file_links.append((path, (status.st_dev, status.st_ino)))
            elif entry.is_dir(follow_symlinks=False) and entry.name not in skipped:
                below.append(path)
            elif entry.is_file(follow_symlinks=False):
                seen.add((device, entry.inode()))
                yield path
        folders += reversed(below)
    for path, target in file_links:
        if target not in seen:
            seen.add(target)
            yield path


def _entries(
    folder: Path, seen: set[tuple[int, int]], problems: list[str]
) -> tuple[int, list[os.DirEntry[str]]]:
    """The device of a folder and its entries by name; no entries if the folder was listed before."""
    try:
        status = folder.stat()
        place = (status.st_dev, status.st_ino)
        if place in seen:
            return status.st_dev, []
        seen.add(place)
        with os.scandir(folder) as entries:
            return status.st_dev, sorted(entries, key=lambda entry: entry.name)
    except NotADirectoryError:  # `root` is a device, a pipe or a socket
        return 0, []
    except OSError as error:
        problems.append(f"{folder} can't be listed: {error.strerror}")
        return 0, []


def _target(link: Path, problems: list[str], *, is_data: bool) -> os.stat_result | None:
    """The status of what a link leads to; None if it can't be followed."""
    try:
        status = link.stat()
    except OSError as error:
        may_be_folder = not (link.suffix and PurePath(os.readlink(link)).suffix)
        if not link.name.startswith(".") and (is_data or may_be_folder):  # .#NAME is a lock of Emacs
            reason = "what it leads to is missing" if isinstance(error, FileNotFoundError) else error.strerror
            problems.append(f"the link {link} can't be followed: {reason}")
        return None
    if is_foreign_link(link):
        problems.append(
            f"{link} is a link that {owner_name(link)} made to what belongs to another user and may be "
            "private. Make the link yourself (ln -s)"
        )
        return None
    return status
