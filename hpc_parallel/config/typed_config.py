"""Converts plain values to the dataclasses of `schema.py`, and lists the keys and types of these classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from hpc_parallel.config.schema import (
    OPTIMIZERS,
    OptimizerConfig,
    RunConfig,
    StrategyConfig,
    register,
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
    """As `typed`, but fifty times as fast, because OmegaConf is not used.

    Returns None if a value needs conversion, is missing, or is invalid.
    """
    run = _filled(RunConfig, values)
    return run if isinstance(run, RunConfig) else None


def strategy_of(recorded: Any) -> StrategyConfig | None:
    """The `strategy` of a recorded configuration, which may be of any type; None if it is not valid.

    Keys that did not exist when the run was recorded have their defaults.
    """
    if not isinstance(recorded, dict):
        return None
    names = [item.name for item in fields(StrategyConfig)]
    values = {**vars(StrategyConfig()), **{name: recorded[name] for name in names if name in recorded}}
    strategy = _filled(StrategyConfig, values)
    return strategy if isinstance(strategy, StrategyConfig) else None


_SEVERAL = ("model", "data", "task")  # groups with a schema for each choice
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
    """Whether the value has exactly the type of the field: true is not an int, and 1 is not a float."""
    if isinstance(hint, UnionType):
        return any(_is(value, option) for option in get_args(hint))
    if get_origin(hint) is list:
        (kind,) = get_args(hint)
        return isinstance(value, list) and (kind is Any or all(type(item) is kind for item in value))
    if get_origin(hint) is dict:
        return isinstance(value, dict) and all(type(key) is str for key in value)
    return type(value) is hint


def schema_keys() -> Iterator[tuple[str, Any]]:
    """The keys of all schemas with their types, including every choice of `model`, `data` and `task`."""
    yield from _of_schema(RunConfig)
    for group in _SEVERAL:
        for schema in _schemas_of(group):
            yield from _of_schema(schema, f"{group}.")


def types_of(key: str) -> list[Any]:
    """The types of one key: in `model`, `data` and `task`, one type for each choice that has the key."""
    group, dot, rest = key.partition(".")
    schemas, names = (_schemas_of(group), rest.split(".")) if dot and group in _SEVERAL else (
        [RunConfig], key.split("."),
    )  # fmt: skip
    for name in names:
        hints = [_hints(schema) for schema in schemas if is_dataclass(schema)]
        schemas = [of_schema[name] for of_schema in hints if name in of_schema]
    return schemas


def _schemas_of(group: str) -> list[Any]:
    register()
    return [OmegaConf.get_type(node.node) for node in ConfigStore.instance().repo[group].values()]


def _of_schema(schema: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, hint in _hints(schema).items():
        if is_dataclass(hint):
            yield from _of_schema(hint, f"{prefix}{name}.")
        elif hint is not Any or prefix:
            yield f"{prefix}{name}", hint
