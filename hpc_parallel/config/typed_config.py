"""From plain values to the dataclasses of `schema.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf

from hpc_parallel.config.schema import (
    OPTIMIZERS,
    OptimizerConfig,
    RunConfig,
    StrategyConfig,
)
from hpc_parallel.config.task_schema import TASKS, TaskConfig


def typed(config: Any) -> RunConfig:
    """The dataclass tree of a resolved configuration (a mapping or an OmegaConf node)."""
    values = OmegaConf.create(config)
    task = TASKS.get(OmegaConf.select(values, "task.name"), TaskConfig)
    optimizer = OPTIMIZERS.get(OmegaConf.select(values, "optimizer.name"), OptimizerConfig)
    merged = OmegaConf.merge(OmegaConf.structured(RunConfig(task=task(), optimizer=optimizer())), config)
    run = OmegaConf.to_object(merged)
    assert isinstance(run, RunConfig)
    return run


def filled(values: Any) -> RunConfig | None:
    """As `typed`, for values that have every key and type already: OmegaConf takes fifty times as long.

    Returns None if a value needs conversion, is missing, or is invalid.
    """
    run = _filled(RunConfig, values)
    return run if isinstance(run, RunConfig) else None


def strategy_of(recorded: Any) -> StrategyConfig | None:
    """The `strategy` of a recorded configuration, which may be of any type; None if a value can't be one.

    Keys that did not exist when the run was recorded have their defaults.
    """
    if not isinstance(recorded, dict):
        return None
    names = [item.name for item in fields(StrategyConfig)]
    values = {**vars(StrategyConfig()), **{name: recorded[name] for name in names if name in recorded}}
    strategy = _filled(StrategyConfig, values)
    return strategy if isinstance(strategy, StrategyConfig) else None


_VARIANTS: dict[type, Mapping[str, type]] = {TaskConfig: TASKS, OptimizerConfig: OPTIMIZERS}
"""Classes whose keys depend on the `name` in them."""


def _filled(schema: type, values: Mapping[str, Any]) -> Any:
    hints = _hints(schema)
    if values.keys() != hints.keys():
        return None
    arguments: dict[str, Any] = {}
    for name, hint in hints.items():
        value = values[name]
        if isinstance(hint, type) and is_dataclass(hint):
            if not isinstance(value, dict):
                return None
            variants = _VARIANTS.get(hint, {})
            value = _filled(variants.get(value.get("name", ""), hint), value)
            if value is None:
                return None
        elif hint is not Any and not _is(value, hint):
            return None
        arguments[name] = value
    return schema(**arguments)


@cache
def _hints(schema: type) -> dict[str, Any]:
    hints = get_type_hints(schema)
    return {field.name: hints[field.name] for field in fields(schema)}


def _is(value: Any, hint: Any) -> bool:
    """Whether the value is what the field says, to the letter: true is no 1, and 1 no 1.0."""
    if isinstance(hint, UnionType):
        return any(_is(value, option) for option in get_args(hint))
    if get_origin(hint) is list:
        (kind,) = get_args(hint)
        return isinstance(value, list) and (kind is Any or all(type(item) is kind for item in value))
    if get_origin(hint) is dict:
        return isinstance(value, dict) and all(type(key) is str for key in value)
    return type(value) is hint
