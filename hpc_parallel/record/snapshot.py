"""Copy the source of a job when the job is submitted, so that later edits do not change a waiting job."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from itertools import chain
from os.path import join
from pathlib import Path
from typing import Any

from hpc_parallel.problems import ConfigError, Problem, printable
from hpc_parallel.record.credentials import is_credential_file
from hpc_parallel.record.git_source import (
    EDITS,
    PACKAGE,
    FolderSource,
    checkout_of,
    folders_of_imports,
    git_source,
    is_source,
    loose_source,
    outside_python,
)
from hpc_parallel.record.run_folder import RunFolder, is_run_folder
from hpc_parallel.record.safe_read import MIB
from hpc_parallel.record.sweep_folder import sweep_of
from hpc_parallel.shadowing import PUBLIC, is_private

_MAX_NAMES = 5  # files in one message


@dataclass(frozen=True)
class Snapshot:
    """Which files are copied to which folders, and from which folders a process then imports."""

    files: Mapping[Path, Sequence[str]]  # checkout -> names of files in it
    copies: Mapping[Path, Path]  # checkout -> its copy
    import_path: tuple[Path, ...]
    origin: RunFolder | None = None  # the run whose kept source is copied again
    left_out: tuple[str, ...] = ()  # files that look like credentials, as paths in the checkout
    links: Mapping[Path, Mapping[str, str]] = field(default_factory=dict)  # checkout -> name -> target
    unkept: Mapping[Path, str] = field(default_factory=dict)  # path -> why it is not copied, for a message

    @property
    def notes(self) -> Iterator[str]:
        """A line about the files that were left out and why, and one for each path that is not kept."""
        if self.left_out:
            more = len(self.left_out) - _MAX_NAMES
            names = ", ".join(map(printable, self.left_out[:_MAX_NAMES])) + f" and {more} more" * (more > 0)
            hint = "launcher.snapshot_credentials=true copies them"
            yield f"not copied  {names} (they look like credentials; {hint})"
        for path, text in self.unkept.items():
            yield f"not kept    {printable(str(path))} {text}"

    def variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Environment variables with which Python imports from the copies before any other folder."""
        inherited = [environment["PYTHONPATH"]] if environment.get("PYTHONPATH") else []
        python_path = os.pathsep.join([*map(str, self.import_path), *inherited])
        return {"PYTHONSAFEPATH": "1"} | ({"PYTHONPATH": python_path} if python_path else {})

    def copy_of(self, path: Path) -> Path | None:
        """The copy of a file; None if it is not copied."""
        for root, copy in self.copies.items():
            for place in (path, path.resolve()):
                if place.is_relative_to(root) and str(place.relative_to(root)) in self.files[root]:
                    return copy / place.relative_to(root)
        return None

    def take(self, copy_file: Callable[[Path, Path], object] = shutil.copy2) -> None:
        """Copy the files, then make the links, so that no file is written through a link."""
        for root, copy in self.copies.items():
            for name in self.files[root]:
                target = copy / name
                target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                if (destination := self._link_target(root / name, target)) is not None:
                    target.symlink_to(destination)
                else:
                    copy_file(root / name, target)
        self._link()

    def tried_in(self, folder: Path) -> Snapshot:
        """Make the same tree in `folder`, with links to the files in place of copies, to import from it."""
        old = next((copy.parent for copy in self.copies.values()), folder)
        trial = self.moved(old, folder)
        trial.take(os.symlink)
        return trial

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
        self._link()

    def _link(self) -> None:
        for root, targets in self.links.items():
            for name, target in targets.items():
                link = self.copies[root] / name
                link.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                link.symlink_to(target)

    def _link_target(self, source: Path, copy: Path) -> str | None:
        """The target of a copy that is a link; None if the content of the file is copied.

        A link to what is copied leads to the copy, so that Python finds what lies beside a linked script. A
        link to another folder keeps its target, which is not copied, like an installed package.
        """
        if not source.is_symlink():
            return None
        target = source.resolve()
        for root, place in self.copies.items():
            if target.is_relative_to(root.resolve()) and (target.is_dir() or self.copy_of(target)):
                inner = place / target.relative_to(root.resolve())
                return os.path.relpath(inner, copy.parent)
        return str(target) if target.is_dir() else None

    def moved(self, old: Path, new: Path) -> Snapshot:
        """The same snapshot with its copies in the folder `new` instead of `old`."""

        def move(path: Path) -> Path:
            return new / path.relative_to(old) if path.is_relative_to(old) else path

        copies = {root: move(copy) for root, copy in self.copies.items()}
        return replace(self, copies=copies, import_path=tuple(map(move, self.import_path)))


def in_place() -> Snapshot:
    """Nothing is copied, and processes import neither from a copy nor from the working directory."""
    return Snapshot({}, {}, tuple(outside_python([PACKAGE])))


def plan_snapshot(
    destination: Path,
    *,
    working_directory: Path,
    most_mb: int = 64,
    exclude: Sequence[str] = (),
    credentials: bool = False,
    also: Sequence[Path] = (),
    imports_here: bool = True,
) -> Snapshot:
    """Plan a copy of every git checkout that this process imports from (git_source.py).

    These checkouts are the working directory's (which may hold the user's own model), this package's, and
    those on `sys.path`. From a folder that is in no checkout, the files are copied if they are few
    (`loose_source`). An installed package is not copied, because it does not change while a job waits. A
    process that imports from the source kept with a run (`rerun`) copies only that source.

    A script finds what it opens beside its own file: the copy has links to the files that are not copied.
    Only files that look like credentials have none.

    exclude: patterns of names of files and folders that are not copied, or of their paths from a checkout's
    root; credentials: also copy files that look like credentials; also: more folders to copy; imports_here:
    whether processes import from the working directory, as `python -m` does. A script file imports from its
    own folder instead.

    Raises ConfigError if more than `most_mb` MiB are left, because so many bytes are not only source.
    """
    here = [working_directory] if imports_here else []
    searched, hiding = folders_of_imports(here)
    imported = list(dict.fromkeys([working_directory, *also, *searched]))
    code = next((folder for path in imported if (folder := kept_code(path)) is not None), None)
    left_out: tuple[str, ...] = ()
    if code is not None:
        checkouts, sources = _kept_sources(imported, code)
        roots = list(sources)
    else:
        checkouts, sources = _sources(imported, destination, most_bytes=most_mb * MIB)
        sources, left_out = _filtered(sources, exclude=exclude, credentials=credentials)
        sources = _with_modules(sources, most_bytes=most_mb * MIB)
        roots = list(dict.fromkeys(checkouts.values()))
        _require_source({root: sources[root] for root in roots}, most_mb=most_mb, exclude=exclude)
    copies = {root: destination / name for root, name in _unique_names(roots).items()}
    import_path = [
        copies[checkouts[path]] / path.relative_to(checkouts[path]) for path in searched if path in checkouts
    ]
    import_path += [path for path in here if is_private(str(path))]  # else other users could add modules
    return Snapshot(
        {root: sources[root].names for root in roots}, copies, tuple(dict.fromkeys(import_path)),
        origin=RunFolder(code.parent) if code is not None else None, left_out=left_out,
        links={root: _outside(sources[root].links, destination) for root in roots},
        unkept=hiding | {path: text for each in sources.values() for path, text in each.unkept.items()},
    )  # fmt: skip


def cached_plan_snapshot() -> Callable[..., Snapshot]:
    """A version of `plan_snapshot` that asks git only once for all runs of a command."""
    cache: dict[str, tuple[Path, Snapshot]] = {}

    def plan(destination: Path, **options: Any) -> Snapshot:
        key = repr(options)
        if key not in cache:
            cache[key] = (destination, plan_snapshot(destination, **options))
        first, snapshot = cache[key]
        return snapshot.moved(first, destination)

    return plan


def _outside(links: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The links that do not lead to a folder above `folder`: `runs`, which git ignores, holds this run."""
    return {name: target for name, target in links.items() if not folder.is_relative_to(target)}


def _sources(
    folders: Sequence[Path], destination: Path, *, most_bytes: int
) -> tuple[dict[Path, Path], dict[Path, FolderSource]]:
    """Folder -> the root of its copy, and root -> its source. A folder that others can change has none."""

    def leave_out(folder: Path) -> bool:
        # Another program's `sweep.json` does not make a sweep folder.
        return folder == destination or is_run_folder(folder) or sweep_of(folder) is not None

    roots = {folder: checkout_of(folder) for folder in folders}
    sources: dict[Path, FolderSource] = {}
    for folder, root in roots.items():
        if root is not None and root not in sources:
            sources[root] = git_source(root, leave_out=leave_out)
        elif root is None and is_private(str(folder)):
            sources[folder] = loose_source(folder, most_bytes=most_bytes, leave_out=leave_out)
        elif root is None and any(folder.glob("*.py")):
            sources[folder] = FolderSource(unkept={folder: f"({PUBLIC}): {EDITS}"})
    kept = {folder: root or folder for folder, root in roots.items()}
    return {folder: root for folder, root in kept.items() if root in sources and sources[root].names}, sources


def _kept_sources(folders: Sequence[Path], code: Path) -> tuple[dict[Path, Path], dict[Path, FolderSource]]:
    """The same for the folder `code` of another run, which is copied as it is."""
    sources = {root: _kept_source(root, code=code) for root in sorted(code.iterdir()) if root.is_dir()}
    inside = [folder for folder in folders if folder.is_relative_to(code)]
    return {folder: code / folder.relative_to(code).parts[0] for folder in inside}, sources


def _filtered(
    sources: Mapping[Path, FolderSource], *, exclude: Sequence[str], credentials: bool
) -> tuple[dict[Path, FolderSource], tuple[str, ...]]:
    """The sources without what `exclude` names and without credentials, and the names of these."""
    filtered = {root: _excluding(source, root, exclude) for root, source in sources.items()}
    names = chain.from_iterable(map(_paths, filtered.values()))
    left_out = () if credentials else tuple(filter(is_credential_file, names))
    return {root: _without(source, left_out) for root, source in filtered.items()}, left_out


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


def _kept_source(root: Path, *, code: Path) -> FolderSource:
    """The files in a copy that another run keeps. A link out of that run's source is not followed."""
    names: list[str] = []
    links: dict[str, str] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink() and not path.resolve().is_relative_to(code.resolve()):
            links[name] = os.readlink(path)
        elif is_source(str(path)):
            names.append(name)
    return FolderSource(tuple(names), links)


def _excluding(source: FolderSource, root: Path, exclude: Sequence[str]) -> FolderSource:
    """The source with links in place of the files and folders that a pattern in `exclude` matches."""

    def match(name: str) -> str | None:
        """The outermost part of a path that a pattern matches."""
        parts = name.split("/")
        for end, part in enumerate(parts, start=1):
            path = "/".join(parts[:end])
            if any(fnmatch(text, pattern.rstrip("/")) for pattern in exclude for text in (path, part)):
                return path
        return None

    excluded = {name: path for name in _paths(source) if (path := match(name)) is not None}
    links = {path: str(root / path) for path in excluded.values() if not is_credential_file(path)}
    left = _without(source, excluded)
    return replace(left, links={**left.links, **links})


def _without(source: FolderSource, paths: Container[str]) -> FolderSource:
    return replace(
        source,
        names=tuple(name for name in source.names if name not in paths),
        links={name: target for name, target in source.links.items() if name not in paths},
        modules=tuple(name for name in source.modules if name not in paths),
    )


def _paths(source: FolderSource) -> Iterable[str]:
    return (*source.names, *source.links, *source.modules)


def _with_modules(sources: Mapping[Path, FolderSource], *, most_bytes: int) -> dict[Path, FolderSource]:
    """Add the modules that git ignores: the smallest as files, up to a limit for all files, else as links."""

    def size(root: Path, name: str) -> int:
        return os.stat(root / name).st_size

    room = most_bytes - sum(size(root, name) for root, source in sources.items() for name in source.names)
    modules = sorted((size(root, name), root, name) for root in sources for name in sources[root].modules)
    complete = dict(sources)
    for module_bytes, root, name in modules:
        source = complete[root]
        if (room := room - module_bytes) >= 0:
            complete[root] = replace(source, names=(*source.names, name))
        else:
            text = f"(larger than launcher.snapshot_mb allows): {EDITS}"
            complete[root] = replace(
                source,
                links={**source.links, name: str(root / name)},
                unkept={**source.unkept, root / name: text},
            )
    return complete


def _require_source(sources: Mapping[Path, FolderSource], *, most_mb: int, exclude: Sequence[str]) -> None:
    """Raise ConfigError if no file is left to copy, or the files are larger than source can be."""
    if exclude and (empty := [root for root, source in sources.items() if not source.names]):
        rule = f"leaves nothing of {empty[0]}, which the run imports from"
        raise ConfigError([Problem("launcher.snapshot_exclude", list(exclude), rule, ([],))])
    sizes = {
        join(root, name): os.lstat(join(root, name)).st_size
        for root, source in sources.items()
        for name in source.names
    }
    total = sum(sizes.values())
    if total > most_mb * MIB:
        path, size = max(sizes.items(), key=lambda item: item[1])
        largest = next(Path(path).relative_to(root) for root in sources if Path(path).is_relative_to(root))
        rule = (
            f"(MiB) is less than what git knows in {' and '.join(map(str, sources))}: {total / MIB:.1f} MiB, "
            f"of which {largest} has {size / MIB:.1f}. Let git ignore files that are not source, or exclude "
            f"them with launcher.snapshot_exclude=['{largest}']"
        )
        raise ConfigError([Problem("launcher.snapshot_mb", most_mb, rule, (math.ceil(total / MIB),))])
