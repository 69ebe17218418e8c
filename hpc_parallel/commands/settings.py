"""The settings of a run that are not the defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import hydra

from hpc_parallel.config.compose import composing, find_folder, resolve
from hpc_parallel.config.schema import register
from hpc_parallel.record.values import flatten

ONCE = ("run_dir", "resume", "dry_run")  # of one start alone
FOLLOWING = {"name": "strategy.name"}  # a default that another setting gives


@dataclass(frozen=True)
class Change:
    """A run's value; `default` is None too where there is none (a key of the chosen model or task)."""

    value: Any
    default: Any
    has_default: bool


@cache
def defaults() -> dict[str, Any]:
    """What the command without a word composes, by dotted keys."""
    register()
    with composing(str(find_folder("conf"))):
        return flatten(resolve(hydra.compose("config"))[1])


def changed(config: Mapping[str, Any]) -> dict[str, Change]:
    """By dotted key."""
    own = flatten(config)
    usual = defaults() | {key: own.get(source) for key, source in FOLLOWING.items()}
    return {
        key: Change(value, usual.get(key), key in usual)
        for key, value in own.items()
        if key not in ONCE and usual.get(key) != value
    }
