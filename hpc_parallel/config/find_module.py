"""Search the module of `python -m`, but import none of its packages: an import could run any code.

    python -P find_module.py MODULE

searches the module in another Python and writes {"problem": TEXT or null} as JSON. For this use, this file
imports nothing of this package.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any


def module_problem(module: str) -> str | None:
    """Why `python -m` in this folder could not run the module; None if it can."""
    paths: Sequence[str] | None = [os.getcwd(), *sys.path]
    for index, part in enumerate(parts := module.split(".")):
        spec = None if paths is None else _spec(".".join(parts[: index + 1]), paths)
        if spec is None:
            return f"can't be found: there is no {part} in {'.'.join(parts[:index]) or 'the import path'}"
        paths = spec.submodule_search_locations
    if paths is not None and _spec(f"{module}.__main__", paths) is None:
        return "is a package without a __main__.py, which python -m would run"
    return None


def _spec(name: str, paths: Sequence[str]) -> ModuleSpec | None:
    """Find a module, also one that pip has installed as editable: setuptools adds a finder for it."""
    finders: list[Any] = [PathFinder, *(finder for finder in sys.meta_path if hasattr(finder, "find_spec"))]
    return next((spec for finder in finders if (spec := finder.find_spec(name, paths)) is not None), None)


if __name__ == "__main__":
    print(json.dumps({"problem": module_problem(sys.argv[1])}))
