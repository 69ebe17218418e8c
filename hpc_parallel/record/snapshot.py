"""The source that a job runs, copied at its submission: edits made while it waits change nothing."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

from hpc_parallel.problems import ConfigError, Problem, printable
from hpc_parallel.record.credentials import is_credential_file
from hpc_parallel.record.run_folder import RunFolder, is_run_folder
from hpc_parallel.shadowing import is_private

MIB = 2**20
_NAMED = 5  # files in one message


@dataclass(frozen=True)
class Snapshot:
    """Which files are copied where, and from where a process imports once they are."""

    files: Mapping[Path, Sequence[str]]  # checkout -> names of files in it
    copies: Mapping[Path, Path]  # checkout -> its copy
    import_path: tuple[Path, ...]  # empty where nothing is copied
    origin: RunFolder | None = None  # the run whose kept source is kept once more
    left_out: tuple[str, ...] = ()  # files that look like credentials, by their path in the checkout

    @property
    def note(self) -> str | None:
        """Which files were left out and why, in one line; None if there are none."""
        if not self.left_out:
            return None
        more = len(self.left_out) - _NAMED
        names = ", ".join(map(printable, self.left_out[:_NAMED])) + f" and {more} more" * (more > 0)
        hint = "launcher.snapshot_credentials=true copies them"
        return f"not copied  {names} (they look like credentials; {hint})"

    def variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """What makes Python import from the copies first; no folder of its own choice comes before."""
        if not self.import_path:
            return {}
        given = [environment["PYTHONPATH"]] if environment.get("PYTHONPATH") else []
        return {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join([*map(str, self.import_path), *given])}

    def take(self) -> None:
        for root, copy in self.copies.items():
            for name in self.files[root]:
                target = copy / name
                target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                if (root / name).is_dir():  # a link: git names no other folder
                    target.symlink_to(_link(root / name, root=root))
                else:
                    shutil.copy2(root / name, target)

    def take_as(self, taken: Snapshot) -> None:
        """The same files once more, by hard links to those of `taken`, where the file system has such."""
        for root, copy in self.copies.items():
            for folder in sorted({os.path.dirname(name) for name in self.files[root]}):
                (copy / folder).mkdir(mode=0o700, parents=True, exist_ok=True)
            before, after = str(taken.copies[root]), str(copy)
            for name in self.files[root]:
                try:
                    os.link(f"{before}/{name}", f"{after}/{name}", follow_symlinks=False)
                except OSError:
                    shutil.copy2(f"{before}/{name}", f"{after}/{name}", follow_symlinks=False)

    def moved(self, old: Path, new: Path) -> Snapshot:
        """The same, to be kept in the folder `new` in place of `old`."""

        def move(place: Path) -> Path:
            return new / place.relative_to(old) if place.is_relative_to(old) else place

        copies = {root: move(copy) for root, copy in self.copies.items()}
        return replace(self, copies=copies, import_path=tuple(map(move, self.import_path)))


def plan_snapshot(
    destination: Path,
    *,
    working_directory: Path,
    most_mb: int = 64,
    exclude: Sequence[str] = (),
    credentials: bool = False,
) -> Snapshot:
    """Copy what git tracks and what it does not ignore, of every checkout that this process imports from:
    the working directory's (a model of the user's own), this package's, and those on `sys.path`. An
    installed package does not change under a waiting job, and stays.

    A process that imports from the source kept with a run (`rerun`) keeps that once more, and nothing of
    today. `exclude`: patterns of the names, or of the paths from a checkout's root, of files and folders.
    credentials: copy also files that look like credentials.

    Raises ConfigError where the rest is more than `most_mb` MiB: then it is not source alone.
    """
    package = Path(__file__).resolve().parents[2]
    places = list(dict.fromkeys([working_directory, package, *_own_import_path()]))
    code = next((found for place in places if (found := kept_code(place)) is not None), None)
    left_out: tuple[str, ...] = ()
    if code is not None:
        places = [place for place in places if place.is_relative_to(code)]
        checkouts = {place: code / place.relative_to(code).parts[0] for place in places}
        roots = sorted(path for path in code.iterdir() if path.is_dir())
        files: dict[Path, list[str]] = {root: _all_files(root) for root in roots}
    else:
        checkouts = {place: root for place in places if (root := checkout_of(place)) is not None}
        roots = list(dict.fromkeys(checkouts.values()))
        source = {root: _left(source_files(root), exclude) for root in roots}
        if not credentials:
            left_out = tuple(name for names in source.values() for name in names if is_credential_file(name))
        files = {root: [name for name in names if name not in left_out] for root, names in source.items()}
        _require_source(files, most_mb=most_mb, exclude=exclude)
    names = [root.name if root.name not in [r.name for r in roots[:i]] else f"{root.name}-{i}"
             for i, root in enumerate(roots)]  # fmt: skip
    copies = {root: destination / name for root, name in zip(roots, names, strict=True)}
    copied = [copies[root] / place.relative_to(root) for place, root in checkouts.items()]
    own = [working_directory] if is_private(str(working_directory)) else []  # no modules of other users
    import_path = tuple(dict.fromkeys([*copied, *own])) if copied else ()
    origin = RunFolder(code.parent) if code is not None else None
    return Snapshot(files, copies, import_path, origin=origin, left_out=left_out)


def kept_code(place: Path) -> Path | None:
    """The folder `code` of the run that keeps `place`; None where no run does."""
    folders = (place, *place.parents)
    return next((path for path in folders[1:] if path.name == "code" and is_run_folder(path.parent)), None)


def checkout_of(place: Path) -> Path | None:
    """The root of the git checkout that holds `place`; None where there is none."""
    found = _git(place, "rev-parse", "--show-toplevel")
    return Path(found.rstrip("\n")) if found else None


def source_files(root: Path) -> list[str]:
    """Names of the files that git tracks (submodules' too) or does not ignore, as they are on the disk now.

    Run folders are left out, or each would hold all before it.
    """
    tracked = _git(root, "ls-files", "--cached", "--recurse-submodules", "-z") or ""
    new = _git(root, "ls-files", "--others", "--exclude-standard", "-z") or ""
    names = [name for name in dict.fromkeys((tracked + new).split("\0")) if name]
    folders = {folder for name in names for folder in Path(name).parents}
    runs = {folder for folder in folders if is_run_folder(root / folder)}
    return [
        name
        for name in names
        if _is_source(root / name) and (not runs or runs.isdisjoint(Path(name).parents))
    ]


def _own_import_path() -> Iterator[Path]:
    """The folders on `sys.path` that are no part of a Python: PYTHONPATH's, and installations in place."""
    pythons = {Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix)}
    for entry in sys.path:
        place = Path(entry)
        if entry and place.is_dir() and not any(place.resolve().is_relative_to(python) for python in pythons):
            yield place.absolute()


def _is_source(path: Path) -> bool:
    """A file, or a link to a folder; git names a submodule that is not checked out as well."""
    return path.is_file() or (path.is_symlink() and path.is_dir())


def _link(link: Path, *, root: Path) -> str:
    """Where the copy of a link to a folder leads: into the copy too, or outside, to where the link does (what
    is there stays there, as an installed package does)."""
    target = link.resolve()
    inside = target.is_relative_to(root.resolve())
    return os.path.relpath(target, link.parent.resolve()) if inside else str(target)


def _all_files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if _is_source(path))


def _left(names: Sequence[str], exclude: Sequence[str]) -> list[str]:
    """The names of which no pattern of `exclude` matches the path, a folder above it, or a part's name."""

    def excluded(name: str) -> bool:
        path = Path(name)
        words = {name, *map(str, path.parents[:-1]), *path.parts}
        return any(fnmatch(word, pattern.rstrip("/")) for pattern in exclude for word in words)

    return [name for name in names if not excluded(name)] if exclude else list(names)


def _require_source(files: Mapping[Path, Sequence[str]], *, most_mb: int, exclude: Sequence[str]) -> None:
    """Raises ConfigError where nothing is left to copy, or more than source can be."""
    if exclude and (bare := [root for root, names in files.items() if not names]):
        rule = f"leaves nothing of {bare[0]}, which the run imports from"
        raise ConfigError([Problem("launcher.snapshot_exclude", list(exclude), rule, ([],))])
    sizes = {root / name: (root / name).lstat().st_size for root, names in files.items() for name in names}
    total = sum(sizes.values())
    if total > most_mb * MIB:
        path, size = max(sizes.items(), key=lambda item: item[1])
        largest = next(path.relative_to(root) for root in files if path.is_relative_to(root))
        rule = (
            f"(MiB) is less than what git knows in {' and '.join(map(str, files))}: {total / MIB:.1f} MiB, "
            f"of which {largest} has {size / MIB:.1f}. Let git ignore what is no source, or leave it out by "
            f"launcher.snapshot_exclude=['{largest}']"
        )
        raise ConfigError([Problem("launcher.snapshot_mb", most_mb, rule, (math.ceil(total / MIB),))])


def _git(directory: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", *words], cwd=directory, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.decode(errors="surrogateescape")
