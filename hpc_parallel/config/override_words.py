"""Completes an override on a command line: the names of groups and keys, and their values.

A shell asks at each press of the tab key, so nothing is composed. The groups are the folders of `conf/`, and
the keys come from the schemas.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpc_parallel.config.places import find_folder
from hpc_parallel.config.typed_config import choices_of, schema_keys, types_of


def override_words(prefix: str, *, extra_dir: str | None = None) -> list[str]:
    """The overrides that begin with `prefix`. Each ends at the next dot or `=` of a key, or has a value.

    extra_dir: the user's folder of configuration files.
    """
    folders = [find_folder("conf"), *([Path(extra_dir)] if extra_dir else [])]
    plus = "+" * prefix.startswith("+")
    word = prefix.removeprefix("+")
    key, equals, value = word.partition("=")
    if equals:  # a sweep has several values between commas
        before, comma, last = value.rpartition(",")
        choices = [choice for choice in _values(key, folders) if choice.startswith(last)]
        overrides = [f"{key}={before}{comma}{choice}" for choice in choices]
    else:
        names = [*_groups(folders), *(key for key, _ in schema_keys())]
        keys = [f"{name}=" for name in names if f"{name}=".startswith(word)]
        overrides = sorted({name[: name.find(".", len(word)) + 1] or name for name in keys})
    return [plus + override for override in overrides]


def _values(key: str, folders: Sequence[Path]) -> list[str]:
    """The possible values of the key; empty if it takes a number or any text."""
    if files := _groups(folders).get(key):
        return files
    if choices := choices_of(key):
        return list(choices)
    return ["true", "false"] if types_of(key) == [bool] else []


def _groups(folders: Sequence[Path]) -> dict[str, list[str]]:
    groups: dict[str, set[str]] = {}
    for folder in folders:
        for file in folder.glob("*/*.yaml"):
            groups.setdefault(file.parent.name, set()).add(file.stem)
    return {group: sorted(names) for group, names in sorted(groups.items())}
