"""Name the file and the line of a configuration file that Hydra can't read or that a schema refuses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import yaml
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

_REFUSED = re.compile(r"In '([^']+)': (\w+) raised while composing config:\n(.*)\n\s+full_key: ?(\S*)\n")


def unreadable_file(error: yaml.YAMLError) -> str:
    """The place and the reason of a mistake in YAML, in one line."""
    if not isinstance(error, yaml.MarkedYAMLError) or (mark := error.problem_mark) is None:
        return " ".join(str(error).split())
    return f"{mark.name}, line {mark.line + 1}, column {mark.column + 1}: {error.problem}."


def unusable_file(error: Exception) -> str:
    """Why the file of a group can't be used, if no single key of it is to blame."""
    match = _REFUSED.match(str(error))
    if match is not None and (path := _path(match[1])) is not None:
        return f"{path} must be a table of keys ({match[3]})."
    return f"{str(error).splitlines()[0].rstrip('.')}."


def misplaced_file(group: str, name: str) -> str | None:
    """Where a file of the user is that Hydra does not find, with a suggestion; None if there is none."""
    for source in GlobalHydra.instance().config_loader().get_sources():
        if source.scheme() != "file":
            continue
        folder = Path(source.path)
        if (path := folder / group / f"{name}.yml").is_file():
            return f"{path} must end in .yaml. Try mv {path} {path.with_suffix('.yaml')}."
        if folder.name == group and (folder / f"{name}.yaml").is_file():
            return f"{name}.yaml is in {folder} itself. Try --config-dir {folder.parent} {group}={name}."
    return None


def refused_key(error: Exception, plain: DictConfig) -> tuple[str, str, bool] | None:
    """The key of a group's file that its schema refuses.

    plain: the configuration without this file.

    Returns the place (`site/cluster/mysite.yaml, line 3`), the dotted key and whether the key is unknown, or
    None if the error is about something else.
    """
    match = _REFUSED.match(str(error))
    if match is None:
        return None
    name, kind, _, key = match.groups()
    path = _path(name)
    if path is None:
        return (name, key, kind == "ConfigKeyError") if key else None
    if not key and (key := _wrong_shape(path, group=name.rpartition("/")[0], plain=plain)) is None:
        return None
    line = _line(path, key.split("."))
    return (str(path) if line is None else f"{path}, line {line}"), key, kind == "ConfigKeyError"


def _path(name: str) -> Path | None:
    sources = GlobalHydra.instance().config_loader().get_sources()
    paths = [Path(source.path, f"{name}.yaml") for source in sources if source.scheme() == "file"]
    return next((path for path in paths if path.is_file()), None)


def _wrong_shape(path: Path, *, group: str, plain: DictConfig) -> str | None:
    """The first key with a list in the place of a table or the reverse: OmegaConf does not name it."""
    root = yaml.compose(path.read_text())
    for key, value in root.value if isinstance(root, yaml.MappingNode) else []:
        full_key = f"{group.replace('/', '.')}.{key.value}"
        default = OmegaConf.select(plain, full_key)
        for wrong, has_other in (
            (yaml.SequenceNode, OmegaConf.is_dict),
            (yaml.MappingNode, OmegaConf.is_list),
        ):
            if isinstance(value, wrong) and has_other(default):
                return full_key
    return None


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
