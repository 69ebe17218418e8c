"""Finds the source that a process imports, in git checkouts and in folders that are in none.

The source of a checkout is copied, and what git ignores becomes links. Modules that git ignores are copied
too, because Python imports them: `_version.py` of setuptools_scm, an extension module that was built in
place, generated code. In a folder that is in no checkout, the files are copied if they are few.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from os.path import dirname, isdir, isfile, islink, join
from pathlib import Path

from hpc_parallel.problems import ConfigError
from hpc_parallel.record.credentials import is_credential_file

MOST_FILES = 2_000  # a folder with more files is a home directory or a data set
MOST_BYTES = 2**20  # of a file that is copied; a larger file is data, and the copy has a link to it
EDITS = "later edits change the run"
_CORE_NAME = re.compile(r"core(\.\d+)?")
_ELF_TYPE_END, _ET_CORE = 18, 4
_NO_SOURCE = ("__pycache__", "node_modules")
IN_PLACE = "launcher.snapshot=false runs in place"
_DOCUMENTATION = ("docs", "doc")
_MODULES = (".py", ".so")
_SUBMODULE = "160000"  # the mode in `git ls-files --stage`


def checkout_of(path: Path) -> Path | None:
    """The root of the git checkout that holds `path`; None if there is none."""
    root = git(path, "rev-parse", "--show-toplevel")
    return Path(root.rstrip("\n")) if root else None


def git_source(root: Path, *, leave_out: Callable[[Path], bool]) -> FolderSource:
    """Look for the files of a checkout and of its submodules. Raises ConfigError if git can't list them.

    leave_out: whether a folder and everything below it is left out, such as the folder of a run: each run
    would otherwise hold all earlier ones. Documentation is left out because no process imports it.
    """
    listed, ignored = _listed(root)

    @cache
    def is_left_out(folder: str) -> bool:
        return leave_out(root / folder) or (folder != "" and is_left_out(dirname(folder)))

    def is_wanted(name: str) -> bool:
        is_documentation = name.split("/")[0] in _DOCUMENTATION and not name.endswith(".py")
        return not is_left_out(dirname(name)) and not is_documentation

    names = [name for name in listed if is_source(join(root, name)) and is_wanted(name)]
    # A folder that git lists is another repository, and no submodule.
    repositories = [name.rstrip("/") for name in listed if name.endswith("/") and is_wanted(name)]
    modules, links = _ignored(root, filter(is_wanted, ignored), leave_out)
    unkept = {root / name: f"(a git checkout of its own): {EDITS}" for name in repositories}
    if sum(isfile(root / name) for name in links) > MOST_FILES:
        links = [name for name in links if isdir(root / name)]
        unkept[root] = f"(git ignores more than {MOST_FILES:,} files): {IN_PLACE}"
    targets = {name: str(root / name) for name in (*repositories, *links)}
    return FolderSource(tuple(names), targets, unkept, modules=tuple(modules))


def is_source(path: str) -> bool:
    """Whether `path` is a file or a link to a folder. git also lists submodules that are not checked out."""
    return (isfile(path) and not is_core_file(path)) or (islink(path) and isdir(path))


def _listed(root: Path) -> tuple[list[str], list[str]]:
    """What git tracks or does not ignore, and what it ignores, also in submodules.

    Folders end with a slash.
    """
    unignored: list[str] = []
    ignored = _names(root, "--others", "--ignored", "--exclude-standard", "--directory")
    for entry in _names(root, "--cached", "--stage"):
        attributes, _, name = entry.partition("\t")
        if not attributes.startswith(_SUBMODULE):
            unignored.append(name)
        elif (root / name / ".git").exists():  # checked out
            for names, inner in zip((unignored, ignored), _listed(root / name), strict=True):
                names += [f"{name}/{path}" for path in inner]
    return [*dict.fromkeys([*unignored, *_names(root, "--others", "--exclude-standard")])], ignored


def _ignored(
    root: Path, names: Iterable[str], leave_out: Callable[[Path], bool]
) -> tuple[list[str], list[str]]:
    """The modules among what git ignores, and the other files and folders."""
    modules: list[str] = []
    others: list[str] = []
    for name in _outermost(names):
        path = root / name
        is_folder = name.endswith("/")
        if is_folder and (is_no_source(path) or leave_out(path)):
            continue
        contents = _of_package(path, leave_out) if is_folder else [""]
        for each in [os.path.normpath(join(name, content)) for content in contents]:
            if is_source(join(root, each)) or isdir(join(root, each)):
                is_copied = each.endswith(_MODULES) or (not is_folder and is_credential_file(each))
                (modules if is_copied else others).append(each)
    return modules, others


def _of_package(folder: Path, leave_out: Callable[[Path], bool]) -> list[str]:
    """The files of a package, or of a folder in one; of any other folder one empty name."""
    if not any((place / "__init__.py").is_file() for place in (folder, folder.parent)):
        return [""]
    files = [*islice(walk(folder, leave_out), MOST_FILES + 1)]
    return files if len(files) <= MOST_FILES else [""]


def _outermost(names: Iterable[str]) -> Iterator[str]:
    """Drop the names below a folder that is listed too. Names of folders end with a slash."""
    folder = None
    for name in sorted(names):
        if folder is None or not name.startswith(folder):
            yield name
            folder = name if name.endswith("/") else None


def _names(root: Path, *options: str) -> list[str]:
    if (listed := git(root, "ls-files", *options, "-z")) is None:  # a damaged index, for example
        raise ConfigError([f"git can't list the files of {root}: git -C {root} status says why. {IN_PLACE}."])
    return [name for name in listed.split("\0") if name]


def git(directory: Path, *arguments: str, errors: str = "surrogateescape") -> str | None:
    """What git prints; None if it fails. errors: how bytes that are not UTF-8 are decoded."""
    try:
        process = subprocess.run(["git", *arguments], cwd=directory, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return process.stdout.decode(errors=errors)


PACKAGE = str(Path(__file__).resolve().parents[2])  # the folder from which this package is imported


def folders_of_imports(first: Sequence[Path]) -> tuple[list[Path], dict[Path, str]]:
    """The folders outside the Python installation from which a process imports, in their order.

    first: folders that Python puts first.

    Python looks into the folders of editable installations last. Their copies are in PYTHONPATH, which comes
    before Python's own modules, so a folder that would hide one of these is left out. It is returned beside
    the others, with the reason.
    """
    variable = os.environ.get("PYTHONPATH")
    python_path = [entry or os.curdir for entry in variable.split(os.pathsep)] if variable else []
    folders = {*first, *outside_python([PACKAGE, *python_path])}
    hiding: dict[Path, str] = {}
    for path in outside_python([*sys.path, *_mapped_folders()]):
        if path not in folders and (names := _hidden_modules(path)):
            hiding[path] = f"({names[0]} in it would hide Python's own): {EDITS}"
    searched = dict.fromkeys([*first, *outside_python([PACKAGE, *sys.path, *_mapped_folders()])])
    return [path for path in searched if path not in hiding], hiding


def _hidden_modules(folder: Path) -> list[str]:
    """The names of files and packages in the folder that have the name of a module of Python itself."""
    try:
        entries = list(folder.iterdir())
    except OSError:  # Python ignores a folder that it can't read
        return []
    return sorted(
        path.name
        for path in entries
        if path.stem in sys.stdlib_module_names and (path.suffix == ".py" or (path / "__init__.py").is_file())
    )


def _mapped_folders() -> Iterator[str]:
    """The folders of packages that setuptools has installed as editable, and finds without `sys.path`."""
    finders = [module for name, module in sys.modules.items() if name.startswith("__editable__")]
    for finder in finders:
        for package, place in getattr(finder, "MAPPING", {}).items():
            parts = Path(place).with_suffix("").parts
            names = tuple(package.split("."))
            if parts[-len(names) :] == names:
                yield os.path.join(*parts[: -len(names)])


def outside_python(entries: Iterable[str]) -> Iterator[Path]:
    """The folders among entries of an import path that are outside the Python installation."""
    for entry in entries:
        path = Path(entry)
        if entry and path.is_dir() and not _is_installed(path):
            yield path.absolute()


def _is_installed(folder: Path) -> bool:
    """Whether the folder belongs to the Python installation or to a virtual environment."""
    pythons = {Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix)}
    return any(folder.resolve().is_relative_to(python) for python in pythons)


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
