"""Name the line of a user's file that can't be used, and what to type for a file or class of the user."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from hpc_parallel.config.compose import COMPOSE_ERRORS, Composer
from hpc_parallel.config.hydra_internals import current_loader, group_choices
from hpc_parallel.config.resolve import flat, missing_keys
from hpc_parallel.data.text import usual_pattern
from hpc_parallel.problems import as_override, shell_word
from hpc_parallel.record.safe_read import is_file, is_folder, is_real_folder, list_folder

_REFUSED = re.compile(r"In '([^']+)': (\w+) raised while composing config:\n(.*)\n\s+full_key: ?(\S*)\n")
_WHOLE = re.compile(r"\s*# *@package +_global_ *$", re.MULTILINE)
_MOST_FILES = 3  # that a message proposes
_READERS = {".npy": "tokens", ".bin": "tokens", ".parquet": "parquet", ".arrow": "parquet", ".txt": "text"}


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


def unusable_file(error: Exception, group: str, name: str, *, plain: DictConfig) -> str:
    """Why the file `name` of a group can't be used, if the reason is not a single key.

    plain: the configuration without this file.
    """
    path, top = _path(f"{group}/{name}"), group.partition("/")[0]
    if path is not None and top not in (*plain, "hydra") and not _WHOLE.match(path.read_text()):
        return f"the first line of {name}.yaml must be '# @package _global_', and its keys those of a run."
    match = _REFUSED.match(str(error))
    if match is not None and (path := _path(match[1])) is not None:
        return f"{path} must be a table of keys ({match[3]})."
    line = re.sub(r"^In '[^']*': |\.? To override a value.*|\.$", "", str(error).splitlines()[0])
    if path is None:
        return f"{line}."
    mischosen = re.match(rf"Could not override|Multiple values|Could not find '{re.escape(group)}/", line)
    advice = " Its defaults choose a file by '- override /strategy: fsdp'." if mischosen else ""
    return f"{path}: {line}.{advice}"


def misplaced_file(group: str, name: str) -> str | None:
    """The place of a user's file that Hydra does not find, with a suggestion; None if none is found."""
    for source in current_loader().get_sources():
        if source.scheme() != "file":
            continue
        folder = Path(source.path)
        if os.path.isfile(path := folder / group / f"{name}.yml"):
            names = f"{shell_word(path)} {shell_word(path.with_suffix('.yaml'))}"
            return f"{path} must end in .yaml. Try mv {names}."
        if folder.name == group and os.path.isfile(folder / f"{name}.yaml"):
            parent = shell_word(folder.parent)
            return f"{name}.yaml is in {folder} itself. Try --config-dir {parent} {group}={name}."
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
    return next(filter(os.path.isfile, paths), None)


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


def files_with(key: str, composer: Composer) -> list[str]:
    """The choices of the group that have the key: the default, then those that need the fewest others."""
    group, _, rest = key.partition(".")
    if group == "jobs" or not rest or not _may_name(rest.rpartition(".")[2], group):
        return []
    default, candidates = composer.defaults().get(group), list[tuple[bool, int, str]]()
    for choice in group_choices(group):
        with suppress(*COMPOSE_ERRORS):
            config = composer.compose([f"{group}={choice}"])
            if key in flat(config):
                candidates.append((choice != default, len(missing_keys(config)), f"{group}={choice}"))
    return [override for *_, override in sorted(candidates)[:_MOST_FILES]]


def _may_name(name: str, group: str) -> bool:
    """Whether a file of the group has the name in it, or takes its keys from another file.

    To compose each choice takes seconds, and no file names a typing error.
    """
    loader = current_loader()
    with suppress(*COMPOSE_ERRORS):
        sources = (
            loader.repository.load_config(f"{group}/{file}") for file in loader.get_group_options(group)
        )
        return any(
            "/" in str(source.defaults_list) or repr(name) in str(source.config)
            for source in filter(None, sources)
        )
    return True  # a file that can't be read


def of_ones_own(key: str, value: str) -> str | None:
    """A sentence with the overrides to use in place of `key=value`; None if `value` names nothing here."""
    if suggestion := _configuration(key, value) or (_data(value) if key == "data" else None):
        return f"Try {suggestion}."
    if key in ("model", "data") and (target := _class_path(value)):
        return of_class(key, target)
    return None


def _configuration(key: str, value: str) -> str | None:
    """The overrides for FOLDER/KEY/VALUE.yaml near the current folder, or for the path of such a file."""
    path = Path(value).expanduser()
    if path.suffix in (".yaml", ".yml") and is_file(path) and path.absolute().parent.name == key:
        return f"--config-dir {shell_word(path.parent.parent)} {as_override(key, path.stem)}"
    folders = [Path(), *(Path(entry.name) for entry in list_folder(Path()) if is_real_folder(entry))]
    matches = (folder for folder in sorted(folders) if is_file(folder / key / f"{value}.yaml"))
    return next((f"--config-dir {shell_word(folder)} {as_override(key, value)}" for folder in matches), None)


def _data(value: str) -> str | None:
    """The overrides for a file or a folder of data."""
    path = Path(value).expanduser()
    where = as_override("data.path", value)
    if not is_folder(path):
        kind = _READERS.get(path.suffix)
        return kind and f"data={kind} {where}"
    suffixes = Counter(Path(entry.name).suffix for entry in list_folder(path))
    if suffixes[".parquet"] or suffixes[".arrow"]:
        return f"data=parquet {where}"
    pattern = usual_pattern(path)
    return pattern and f"data=text {where} {as_override('data.pattern', pattern)}"


def _class_path(value: str) -> str | None:
    """The path of the class that a value like `mymodel.Net` or `mymodel.py` names."""
    module, _, name = value.removesuffix(".py").replace("/", ".").rpartition(".")
    if value.endswith(".py"):
        return f"{module}.{name}.CLASS".lstrip(".")
    return value if module and all(part.isidentifier() for part in value.split(".")) else None


def of_class(key: str, target: str) -> str:
    """How to choose a class of the user's own: a sentence with overrides. `key` is model or data."""
    if key == "data":
        return f"Try data=dataset data.dataset._target_={target}."
    return (
        f"Your own class is chosen by a file site/model/mine.yaml with the line `_target_: {target}` and its "
        "arguments. Then try --config-dir site model=mine."
    )
