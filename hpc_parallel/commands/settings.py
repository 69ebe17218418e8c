"""The settings of a run that are not the defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from hpc_parallel.config.compose import Composer
from hpc_parallel.config.hydra_internals import composing
from hpc_parallel.config.node_devices import AUTO
from hpc_parallel.config.places import find_folder
from hpc_parallel.config.resolve import resolve
from hpc_parallel.config.schema import register
from hpc_parallel.config.script import KINDS, TASK, name_of
from hpc_parallel.record.values import flatten

ONCE = ("run_dir", "resume", "dry_run")  # keys that belong to one start
# Keys that `task=script` sets itself.
OF_SCRIPTS = ("strategy.name", "training.global_batch_size")
LAUNCHER = "launcher.kind"
FOLLOWING = {"name": "strategy.name"}  # a key whose default is the value of another key


@dataclass(frozen=True)
class Change:
    """A value that is not the default; keys of the chosen model or task may have no default."""

    value: Any
    default: Any
    has_default: bool


@cache
def defaults() -> dict[str, Any]:
    """The configuration of the command without overrides, by dotted keys."""
    register()
    with composing(str(find_folder("conf"))):
        return flatten(resolve(Composer("config").compose([])).values)


def changed(config: Mapping[str, Any]) -> dict[str, Change]:
    values = flatten(config)
    default_values = defaults() | {key: values.get(source) for key, source in FOLLOWING.items()}
    if values.get(LAUNCHER) == AUTO:  # recorded by a version that kept `auto`
        default_values[LAUNCHER] = AUTO
    if values.get("task.name") == TASK:
        script = {key: values.get(f"script.{key}") for key in KINDS}
        default_values |= {"name": name_of(script), **{key: values.get(key) for key in OF_SCRIPTS}}
        default_values["cluster.hang_timeout_s"] = None
    return {
        key: Change(value, default_values.get(key), key in default_values)
        for key, value in values.items()
        if key not in ONCE and default_values.get(key) != value
    }
