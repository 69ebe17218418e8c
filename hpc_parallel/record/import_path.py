"""Finds the folders outside the Python installation from which a process imports, to keep their source."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from hpc_parallel.record.loose_source import EDITS

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
