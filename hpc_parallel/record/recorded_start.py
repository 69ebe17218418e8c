"""How a run was started, as its folder records it, for `resume=` and `rerun`.

Trust is decided from the current command line, before anything in the folder is read. Recorded overrides
never grant trust. In a folder that another user owns, only settings that can't run code are accepted.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_parallel.problems import ConfigError, printable, raise_if_any
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import DamagedError, read_json
from hpc_parallel.record.trust import UntrustedError, owner_name, require_private

SHARED_FOLDER = "launcher.shared_folder"  # the override with which the user grants trust
NOTIFY = "launcher.notify"
STAGES, NO_STAGES = "then", "then=null"
# Top-level keys whose values are numbers, names, and paths from which only data are read.
HARMLESS = {"model", "data", "training", "strategy", "optimizer", "task", "seed", "nodes", "gpus_per_node",
            "device", "name", "plan"}  # fmt: skip
_NAME = re.compile(r"[\w.-]*", re.ASCII)


@dataclass(frozen=True)
class RecordedStart:
    """The command line of a run."""

    overrides: tuple[str, ...]  # without those that only count if they are typed
    config_dir: Path | None
    values: dict[str, Any]  # the whole environment.json


def read_start(folder: RunFolder, *, key: str, shared_folder: bool = False) -> RecordedStart:
    """Read from environment.json how the run was started.

    key: the argument that named the folder, for messages; shared_folder: the user allows other writers.

    Raises ConfigError if the folder can't be trusted, or its records are damaged or could run code.
    """
    try:
        if not shared_folder:
            require_private(folder.path)
    except UntrustedError as error:
        hint = "" if key == "rerun" else f". If you trust them: {SHARED_FOLDER}=true"
        raise ConfigError(
            [f"{key} = {folder.path} is not to be trusted: {str(error).rstrip('.')}{hint}"]
        ) from error
    try:
        values = read_json(folder.environment)
        if values is None:
            raise DamagedError(folder.environment, "it is not there")
        overrides, config_dir = values.get("overrides"), values.get("config_dir")
        is_list = isinstance(overrides, list) and all(isinstance(override, str) for override in overrides)
        if not is_list or not isinstance(config_dir, str | None):
            raise DamagedError(folder.environment, "it does not say how the run was started")
    except DamagedError as error:
        raise ConfigError([f"{key} = {folder.path}: {error}. Start a new run."]) from error
    kept = tuple(inherited(overrides or ()))
    start = RecordedStart(kept, None if config_dir is None else Path(config_dir), values)
    if owner := _other_owner(folder):
        raise_if_any(_dangers(start, key=key, owner=owner))
    return start


def inherited(overrides: Sequence[str]) -> list[str]:
    """The recorded overrides without those that only count if they are typed."""
    if any(key_of(override) == NOTIFY for override in overrides):
        print(f"the recorded {NOTIFY} is not used: only what is typed now counts", file=sys.stderr)
    return [
        override for override in overrides
        if key_of(override) not in (SHARED_FOLDER, NOTIFY)
        and (key_of(override).partition(".")[0] != STAGES or override == NO_STAGES)
    ]  # fmt: skip


def grants_trust(overrides: Sequence[str], value_of: Callable[[str], Any]) -> bool:
    """Whether the user typed `launcher.shared_folder=true`. If there are several values, the last counts."""
    typed = [override for override in overrides if key_of(override) == SHARED_FOLDER and "=" in override]
    return bool(typed) and value_of(typed[-1]) is True


def key_of(override: str) -> str:
    """The dotted key of an override, without Hydra's plus or tilde."""
    return override.partition("=")[0].lstrip("+~")


def _other_owner(folder: RunFolder) -> str | None:
    """Another user who owns the folder or its records; None if this user or root owns all."""
    paths = (folder.path, folder.environment, folder.config)
    return next((name for path in paths if (name := owner_name(path)) is not None), None)


def _is_harmless(override: str) -> bool:
    """Whether an override sets a plain value below a key in HARMLESS, or chooses that group by its name.

    A choice by a path is not harmless.
    """
    key, _, value = override.partition("=")
    root, dot, _ = key_of(key).partition(".")
    names_function = key_of(key) == "optimizer.schedule" and "." in value  # it would be imported
    is_plain = not {"{", "$"} & set(value) and "_target_" not in override and not names_function
    return root in HARMLESS and is_plain and (bool(dot) or _NAME.fullmatch(value) is not None)


def _dangers(start: RecordedStart, *, key: str, owner: str) -> Iterator[str]:
    if start.config_dir is not None:
        yield (
            f"{key}: the run belongs to {owner} and has a configuration folder of theirs, "
            f"{printable(start.config_dir)}. Review it and type --config-dir yourself."
        )
    for override in start.overrides:
        if not _is_harmless(override):
            yield (
                f"{key}: the run belongs to {owner}, and its setting {printable(override)} could run code or "
                "read your environment. Start a run of your own and type the settings that you want."
            )
