"""Name the file and the line of a configuration file that Hydra can't read or that a schema refuses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import yaml
from hydra.core.global_hydra import GlobalHydra

_REFUSED = re.compile(r"In '([^']+)': (\w+) raised while composing config:\n(.*)\n\s+full_key: (\S+)")


def unreadable_file(error: yaml.YAMLError) -> str:
    """The place and the reason of a mistake in YAML, in one line."""
    if not isinstance(error, yaml.MarkedYAMLError) or (mark := error.problem_mark) is None:
        return " ".join(str(error).split())
    return f"{mark.name}, line {mark.line + 1}, column {mark.column + 1}: {error.problem}."


def refused_key(error: Exception) -> tuple[str, str, bool] | None:
    """The key of a group's file that its schema refuses.

    Returns the place (`site/cluster/mysite.yaml, line 3`), the dotted key and whether the key is unknown, or
    None if the error is about something else.
    """
    match = _REFUSED.match(str(error))
    if match is None:
        return None
    name, kind, _, key = match.groups()
    return _place(name, key), key, kind == "ConfigKeyError"


def _place(name: str, key: str) -> str:
    for source in GlobalHydra.instance().config_loader().get_sources():
        path = Path(source.path, f"{name}.yaml")
        if source.scheme() == "file" and path.is_file():
            line = _line(path, key.split("."))
            return f"{path}, line {line}" if line is not None else str(path)
    return name


def _line(path: Path, key: Sequence[str]) -> int | None:
    """The line of the key, which may begin with the group of the file."""
    root = yaml.compose(path.read_text())
    for parts in (key, key[1:]):
        node: yaml.Node | None = root
        line: int | None = None
        for part in parts:
            pairs = node.value if isinstance(node, yaml.MappingNode) else []
            node, line = next(((v, k.start_mark.line + 1) for k, v in pairs if k.value == part), (None, None))
        if line is not None:
            return line
    return None
