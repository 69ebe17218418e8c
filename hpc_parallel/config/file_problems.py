"""Name the file and the line of a configuration file that Hydra can't read or that a schema refuses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from hpc_parallel.config.hydra_internals import current_loader

_REFUSED = re.compile(r"In '([^']+)': (\w+) raised while composing config:\n(.*)\n\s+full_key: ?(\S*)\n")


@dataclass(frozen=True)
class RefusedKey:
    """A key of a file. place: `site/cluster/mysite.yaml, line 3`; unknown: there is no such key."""

    place: str
    key: str
    unknown: bool


def unreadable_file(error: yaml.YAMLError) -> str:
    """The place and the reason of a mistake in YAML, in one line."""
    if not isinstance(error, yaml.MarkedYAMLError) or (mark := error.problem_mark) is None:
        return " ".join(str(error).split())
    return f"{mark.name}, line {mark.line + 1}, column {mark.column + 1}: {error.problem}."


def unusable_file(error: Exception) -> str:
    """Why the file of a group can't be used, if the reason is not a single key."""
    match = _REFUSED.match(str(error))
    if match is not None and (path := _path(match[1])) is not None:
        return f"{path} must be a table of keys ({match[3]})."
    return f"{str(error).splitlines()[0].rstrip('.')}."


def misplaced_file(group: str, name: str) -> str | None:
    """The place of a user's file that Hydra does not find, with a suggestion; None if none is found."""
    for source in current_loader().get_sources():
        if source.scheme() != "file":
            continue
        folder = Path(source.path)
        if (path := folder / group / f"{name}.yml").is_file():
            return f"{path} must end in .yaml. Try mv {path} {path.with_suffix('.yaml')}."
        if folder.name == group and (folder / f"{name}.yaml").is_file():
            return f"{name}.yaml is in {folder} itself. Try --config-dir {folder.parent} {group}={name}."
    return None


def refused_keys(error: Exception, plain: DictConfig) -> list[RefusedKey]:
    """The keys of a group's file that its schema refuses; empty if the error is about something else.

    plain: the configuration without this file.
    """
    match = _REFUSED.match(str(error))
    if match is None:
        return []
    name, kind, _, first = match.groups()
    path = _path(name)
    if path is None:
        return [RefusedKey(name, first, kind == "ConfigKeyError")] if first else []
    group = name.rpartition("/")[0].replace("/", ".")
    refused = _each_refused(path, group=group, plain=plain)
    if not refused and first:
        refused = {first: kind == "ConfigKeyError"}
    return [RefusedKey(_place(path, key), key, unknown) for key, unknown in refused.items()]


def _each_refused(path: Path, *, group: str, plain: DictConfig) -> dict[str, bool]:
    """All keys that the group's schema refuses -> whether they are unknown. Hydra stops at the first key.

    Empty if the file chooses its schema itself, by `defaults`.
    """
    kind, values = OmegaConf.get_type(OmegaConf.select(plain, group)), yaml.safe_load(path.read_text())
    refused: dict[str, bool] = {}
    if not isinstance(values, dict) or "defaults" in values or not is_dataclass(kind):
        return refused
    schema = OmegaConf.structured(kind)  # in `plain`, even tables for any key refuse new keys
    for key, value in values.items():
        try:
            OmegaConf.merge(schema, {key: value})
        except OmegaConfBaseException as error:
            full_key = error.full_key or ""
            if not full_key.startswith(f"{group}.{key}"):  # a list is in the place of a table, or the reverse
                full_key = f"{group}.{key}"
            refused[full_key] = isinstance(error, ConfigKeyError)
    return refused


def _path(name: str) -> Path | None:
    sources = current_loader().get_sources()
    paths = [Path(source.path, f"{name}.yaml") for source in sources if source.scheme() == "file"]
    return next((path for path in paths if path.is_file()), None)


def _place(path: Path, key: str) -> str:
    line = _line(path, key.split("."))
    return str(path) if line is None else f"{path}, line {line}"


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
