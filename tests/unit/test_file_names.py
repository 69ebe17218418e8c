"""One name has one subject: no two files of the package have the same name, and no two classes."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import hpc_parallel

PACKAGE = Path(hpc_parallel.__file__).parent
FIXED = {"__init__.py", "__main__.py"}  # names that Python needs
PRINTED = {"Attention", "Block", "Head"}  # parts of models: users see these names when a model is printed


def test_no_file_name_stands_twice() -> None:
    names = Counter(path.name for path in PACKAGE.rglob("*.py"))
    assert len(names) > 300
    assert [name for name, count in names.items() if count > 1 and name not in FIXED] == []


def test_no_class_name_stands_twice() -> None:
    classes = Counter(
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    )
    assert len(classes) > 400
    assert [name for name, count in classes.items() if count > 1 and name not in PRINTED] == []
