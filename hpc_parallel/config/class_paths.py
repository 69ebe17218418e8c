"""Whether a class path names a class, without importing its module, which may need torch."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hpc_parallel.problems import Problem, Problems, nearest, shell_word
from hpc_parallel.record.safe_read import is_file, is_real_folder, list_folder


def class_tables(key: str, table: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (dotted key, table) for `table` and each table inside it that has a `_target_`."""
    if not isinstance(table, dict):
        return
    if table.get("_target_"):
        yield key, table
    for name, value in table.items():
        yield from class_tables(f"{key}.{name}", value)


def target_problems(key: str, target: Any, *, kind: str = "class") -> Problems:
    """Yields a problem if the class path at `key` names no `kind`."""
    if (missing := missing_part(str(target), kind=kind)) is not None:
        rule, legal = missing
        yield Problem(key, target, rule, legal)


def missing_part(target: str, *, kind: str = "class") -> tuple[str, tuple[str, ...]] | None:
    """Returns the rule that a class path breaks, and similar class paths; None if its class exists.

    kind: what the path must name, `class` or `function`.

    A module that can't be read as source (compiled, or it creates the class at import) counts as correct.
    """
    *modules, name = target.split(".")
    if not modules or not all(part.isidentifier() for part in (*modules, name)):
        return f"is not the path of a {kind} (package.module.{kind.capitalize()})", ()
    dotted = modules[0]
    spec = _top_level(dotted)
    for part in modules[1:]:
        if spec is None:
            break
        if spec.submodule_search_locations is None:
            return None  # a class in a class
        dotted = f"{dotted}.{part}"
        # Search by the last name: in a folder without __init__.py, the full name needs an imported parent.
        spec = PathFinder.find_spec(part, list(spec.submodule_search_locations))
    if spec is None:
        return _without_module(target, dotted, kind=kind)
    if not spec.origin or not spec.origin.endswith(".py"):
        return None
    names = _names_in(Path(spec.origin), os.stat(spec.origin).st_mtime_ns)
    if names is None or name in names:
        return None
    near = nearest(name, [other for other in names if other[:1].isupper() == (kind == "class")])
    return f"names no {kind}: there is no {name} in {dotted}", tuple(f"{dotted}.{other}" for other in near)


def _without_module(target: str, module: str, *, kind: str) -> tuple[str, tuple[str, ...]]:
    """The same for a missing module: the rule says where the module is, if that is known."""
    rule = f"names no {kind}: there is no module {module} here"
    if "." in module:
        return rule, ()
    if (folder := _folder_of(module)) is not None:
        return f"{rule}, but in {folder}: start in that folder, or with PYTHONPATH={shell_word(folder)}", ()
    stems = [Path(entry.name).stem for entry in list_folder(Path.cwd()) if entry.name.endswith(".py")]
    similar = [target.replace(module, stem, 1) for stem in nearest(module, stems)]
    return f"{rule}, in this folder or on PYTHONPATH", tuple(similar)


def _folder_of(module: str) -> Path | None:
    """The folder of a user's module that is not on Python's path: above, beside or below this folder."""
    current = Path.cwd()
    near = [*_folders_in(current), *_folders_in(current.parent)]
    for folder in (*current.parents, *near):
        for file in (folder / f"{module}.py", folder / module / "__init__.py"):
            if is_file(file) and file.stat().st_uid == os.geteuid():
                return folder
    return None


def _folders_in(folder: Path) -> list[Path]:
    return sorted(Path(entry.path) for entry in list_folder(folder) if is_real_folder(entry))


def _top_level(module: str) -> ModuleSpec | None:
    sys.path.insert(0, str(Path.cwd()))  # `python -m` has it there, a console script does not
    try:
        return find_spec(module)
    except ValueError:  # a module without a spec, such as __main__
        return None
    finally:
        sys.path.pop(0)


@cache  # every run of a sweep needs the same result
def _names_in(source: Path, changed_ns: int) -> frozenset[str] | None:
    """The names that a module binds at its top level; None if it may bind others.

    changed_ns: when the file was changed last. In a notebook, it is changed between two calls.
    """
    try:
        tree = ast.parse(source.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.Expr):
            parts = (part for part in ast.walk(node) if isinstance(part, ast.Name))
            names |= {part.id for part in parts if isinstance(part.ctx, ast.Store)}
        else:
            return None  # a condition or a loop, which may bind anything
    return None if "*" in names or "__getattr__" in names else frozenset(names)
