"""Copy the source of a job when the job is submitted, so that later edits do not change a waiting job."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import cache
from os.path import dirname, isdir, isfile, islink, join
from pathlib import Path

from hpc_parallel.problems import ConfigError, Problem, printable
from hpc_parallel.record.credentials import is_credential_file
from hpc_parallel.record.loose_source import LooseSource, is_core_file, loose_source
from hpc_parallel.record.run_folder import RunFolder, is_run_folder
from hpc_parallel.record.safe_read import DamagedError
from hpc_parallel.record.sweep_folder import read_sweep
from hpc_parallel.shadowing import is_private

MIB = 2**20
DOCUMENTATION = ("docs", "doc")
_MAX_NAMES = 5  # files in one message


@dataclass(frozen=True)
class Snapshot:
    """Which files are copied to which folders, and from which folders a process then imports."""

    files: Mapping[Path, Sequence[str]]  # checkout -> names of files in it
    copies: Mapping[Path, Path]  # checkout -> its copy
    import_path: tuple[Path, ...]  # empty if nothing is copied
    origin: RunFolder | None = None  # the run whose kept source is copied again
    left_out: tuple[str, ...] = ()  # files that look like credentials, as paths in the checkout
    links: frozenset[Path] = frozenset()  # files that are too large to copy
    unkept: Mapping[Path, str] = field(default_factory=dict)  # folder -> why nothing of it is copied

    @property
    def notes(self) -> Iterator[str]:
        """A line about the files that were left out and why, and one for each folder that is not kept."""
        if self.left_out:
            more = len(self.left_out) - _MAX_NAMES
            names = ", ".join(map(printable, self.left_out[:_MAX_NAMES])) + f" and {more} more" * (more > 0)
            hint = "launcher.snapshot_credentials=true copies them"
            yield f"not copied  {names} (they look like credentials; {hint})"
        for folder, reason in self.unkept.items():
            yield f"not kept    {printable(str(folder))} ({reason}): later edits change the run"

    def variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Environment variables with which Python imports from the copies before any other folder."""
        if not self.import_path:
            return {}
        inherited = [environment["PYTHONPATH"]] if environment.get("PYTHONPATH") else []
        python_path = os.pathsep.join([*map(str, self.import_path), *inherited])
        return {"PYTHONSAFEPATH": "1", "PYTHONPATH": python_path}

    def copy_of(self, path: Path) -> Path | None:
        """The copy of a file; None if it is not copied."""
        for root, copy in self.copies.items():
            for place in (path, path.resolve()):
                if place.is_relative_to(root) and str(place.relative_to(root)) in self.files[root]:
                    return copy / place.relative_to(root)
        return None

    def take(self) -> None:
        """Copy the files."""
        for root, copy in self.copies.items():
            for name in self.files[root]:
                target = copy / name
                target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                if (root / name).is_dir():  # a link: git lists no other folder
                    target.symlink_to(_link_target(root / name, root=root))
                elif root / name in self.links:
                    target.symlink_to(root / name)
                else:
                    shutil.copy2(root / name, target)

    def take_as(self, original: Snapshot) -> None:
        """Make the copies of `original` again: by hard links, or as copies if the file system has none."""
        for root, copy in self.copies.items():
            for folder in sorted({os.path.dirname(name) for name in self.files[root]}):
                (copy / folder).mkdir(mode=0o700, parents=True, exist_ok=True)
            before, after = str(original.copies[root]), str(copy)
            for name in self.files[root]:
                try:
                    os.link(f"{before}/{name}", f"{after}/{name}", follow_symlinks=False)
                except OSError:
                    shutil.copy2(f"{before}/{name}", f"{after}/{name}", follow_symlinks=False)

    def moved(self, old: Path, new: Path) -> Snapshot:
        """The same snapshot with its copies in the folder `new` instead of `old`."""

        def move(path: Path) -> Path:
            return new / path.relative_to(old) if path.is_relative_to(old) else path

        copies = {root: move(copy) for root, copy in self.copies.items()}
        return replace(self, copies=copies, import_path=tuple(map(move, self.import_path)))


def plan_snapshot(
    destination: Path,
    *,
    working_directory: Path,
    most_mb: int = 64,
    exclude: Sequence[str] = (),
    credentials: bool = False,
    also: Sequence[Path] = (),
) -> Snapshot:
    """Plan a copy of every git checkout that this process imports from, without the files that git ignores.

    These checkouts are the working directory's (which may hold the user's own model), this package's, and
    those on `sys.path`. From a folder that is in no checkout, the files are copied if they are few
    (loose_source.py). An installed package is not copied, because it does not change while a job waits. A
    process that imports from the source kept with a run (`rerun`) copies only that source.

    exclude: patterns of names of files and folders, or of their paths from a checkout's root;
    credentials: also copy files that look like credentials; also: more folders from which runs import.

    Raises ConfigError if more than `most_mb` MiB are left, because so many bytes are not only source.
    """
    package = Path(__file__).resolve().parents[2]
    imported = list(dict.fromkeys([working_directory, *also, package, *_editable_import_path()]))
    code = next((folder for path in imported if (folder := kept_code(path)) is not None), None)
    if code is not None:
        checkouts = {
            path: code / path.relative_to(code).parts[0] for path in imported if path.is_relative_to(code)
        }
        files = {root: _all_files(root) for root in sorted(path for path in code.iterdir() if path.is_dir())}
        loose: dict[Path, LooseSource] = {}
        left_out: tuple[str, ...] = ()
    else:
        roots = {path: checkout_of(path) for path in imported}
        loose = _loose_sources((path for path in roots if roots[path] is None), destination, most_mb=most_mb)
        checkouts = {path: root or path for path, root in roots.items() if root or loose[path].names}
        names_of = {
            root: loose[root].names if root in loose else source_files(root) for root in checkouts.values()
        }
        source = {root: _without(names, exclude) for root, names in names_of.items()}
        left_out = () if credentials else _credential_files(source)
        files = {root: [name for name in names if name not in left_out] for root, names in source.items()}
        _require_source(files, most_mb=most_mb, exclude=exclude)
    copies = {root: destination / name for root, name in _unique_names(list(files)).items()}
    import_path = [copies[root] / path.relative_to(root) for path, root in checkouts.items()]
    if import_path and is_private(str(working_directory)):  # otherwise other users could add modules
        import_path.append(working_directory)
    origin = RunFolder(code.parent) if code is not None else None
    return Snapshot(
        files, copies, tuple(dict.fromkeys(import_path)), origin=origin, left_out=left_out,
        links=frozenset(path / name for path, each in loose.items() for name in each.links),
        unkept={path: each.reason for path, each in loose.items() if each.reason},
    )  # fmt: skip


def _loose_sources(folders: Iterable[Path], destination: Path, *, most_mb: int) -> dict[Path, LooseSource]:
    """The source in folders that are in no checkout. A folder that others can change counts as empty."""

    def leave_out(folder: Path) -> bool:
        return folder == destination or _is_of_ours(folder)

    return {
        folder: loose_source(folder, most_bytes=most_mb * MIB, leave_out=leave_out)
        if is_private(str(folder)) and not _is_installed(folder)
        else LooseSource()
        for folder in folders
    }


def _credential_files(source: Mapping[Path, Sequence[str]]) -> tuple[str, ...]:
    return tuple(name for names in source.values() for name in names if is_credential_file(name))


def _unique_names(roots: Sequence[Path]) -> dict[Path, str]:
    """The last part of each path, followed by the index of the path if an earlier path ends the same."""
    names = [root.name for root in roots]
    return {
        root: root.name if root.name not in names[:index] else f"{root.name}-{index}"
        for index, root in enumerate(roots)
    }


def kept_code(path: Path) -> Path | None:
    """The folder `code` of the run that keeps `path`; None if no run does."""
    return next(
        (parent for parent in path.parents if parent.name == "code" and is_run_folder(parent.parent)), None
    )


def checkout_of(path: Path) -> Path | None:
    """The root of the git checkout that holds `path`; None if there is none."""
    root = _git(path, "rev-parse", "--show-toplevel")
    return Path(root.rstrip("\n")) if root else None


def source_files(root: Path) -> list[str]:
    """Names of the existing files that git tracks (also in submodules) or does not ignore.

    Folders of runs and sweeps are left out, because each run would otherwise hold a copy of all earlier ones.
    Documentation is left out because no process imports it.
    """
    tracked = _git(root, "ls-files", "--cached", "--recurse-submodules", "-z") or ""
    new = _git(root, "ls-files", "--others", "--exclude-standard", "-z") or ""
    names = [name for name in dict.fromkeys((tracked + new).split("\0")) if name]

    @cache
    def is_of_a_run(folder: str) -> bool:
        path = root / folder
        return _is_of_ours(path) or (folder != "" and is_of_a_run(dirname(folder)))

    return [
        name
        for name in names
        if _is_source(join(root, name)) and not is_of_a_run(dirname(name)) and not _is_documentation(name)
    ]


def _is_of_ours(folder: Path) -> bool:
    return is_run_folder(folder) or _is_sweep(folder)


def _is_sweep(folder: Path) -> bool:
    """Whether `folder` is a sweep folder of this package, and not one with another program's `sweep.json`."""
    try:
        read_sweep(folder)
    except (OSError, DamagedError):
        return False
    return True


def _is_documentation(name: str) -> bool:
    """Whether the file is in the checkout's folder for documentation, and can't be imported."""
    return name.split("/")[0] in DOCUMENTATION and not name.endswith(".py")


def _editable_import_path() -> Iterator[Path]:
    """The folders on `sys.path` outside the Python installation: PYTHONPATH and editable installations."""
    for entry in sys.path:
        path = Path(entry)
        if entry and path.is_dir() and not _is_installed(path):
            yield path.absolute()


def _is_installed(folder: Path) -> bool:
    """Whether the folder belongs to the Python installation or to a virtual environment."""
    pythons = {Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix)}
    return any(folder.resolve().is_relative_to(python) for python in pythons)


def _is_source(path: str) -> bool:
    """Whether `path` is a file or a link to a folder. git also lists submodules that are not checked out."""
    return (isfile(path) and not is_core_file(path)) or (islink(path) and isdir(path))


def _link_target(link: Path, *, root: Path) -> str:
    """The target for the copy of a link to a folder.

    A link into the checkout becomes a link into the copy. A link to a folder outside keeps its target. The
    target is not copied, like an installed package.
    """
    target = link.resolve()
    inside = target.is_relative_to(root.resolve())
    return os.path.relpath(target, link.parent.resolve()) if inside else str(target)


def _all_files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if _is_source(str(path)))


def _without(names: Sequence[str], exclude: Sequence[str]) -> list[str]:
    """Drop the names whose path, parent folder or path component matches a pattern in `exclude`."""

    def excluded(name: str) -> bool:
        path = Path(name)
        candidates = {name, *map(str, path.parents[:-1]), *path.parts}
        return any(fnmatch(text, pattern.rstrip("/")) for pattern in exclude for text in candidates)

    return [name for name in names if not excluded(name)] if exclude else list(names)


def _require_source(files: Mapping[Path, Sequence[str]], *, most_mb: int, exclude: Sequence[str]) -> None:
    """Raise ConfigError if no file is left to copy, or the files are larger than source can be."""
    if exclude and (empty := [root for root, names in files.items() if not names]):
        rule = f"leaves nothing of {empty[0]}, which the run imports from"
        raise ConfigError([Problem("launcher.snapshot_exclude", list(exclude), rule, ([],))])
    sizes = {
        join(root, name): os.lstat(join(root, name)).st_size
        for root, names in files.items()
        for name in names
    }
    total = sum(sizes.values())
    if total > most_mb * MIB:
        path, size = max(sizes.items(), key=lambda item: item[1])
        largest = next(Path(path).relative_to(root) for root in files if Path(path).is_relative_to(root))
        rule = (
            f"(MiB) is less than what git knows in {' and '.join(map(str, files))}: {total / MIB:.1f} MiB, "
            f"of which {largest} has {size / MIB:.1f}. Let git ignore files that are not source, or exclude "
            f"them with launcher.snapshot_exclude=['{largest}']"
        )
        raise ConfigError([Problem("launcher.snapshot_mb", most_mb, rule, (math.ceil(total / MIB),))])


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        process = subprocess.run(["git", *arguments], cwd=directory, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return process.stdout.decode(errors="surrogateescape")
