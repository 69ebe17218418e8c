"""Converts plain values to the dataclasses of `schema.py`, and lists the keys and types of these classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from hpc_parallel.config.schema import GROUPS, OPTIMIZERS, OptimizerConfig, RunConfig, StrategyConfig
from hpc_parallel.config.task_schema import TASKS, TaskConfig
from hpc_parallel.layout.axes import MISSING
from hpc_parallel.problems import ConfigError, Problem
from hpc_parallel.rules import Rule, default_of, rules_of

_T = TypeVar("_T")


class MistypedError(ConfigError):
    """Raised for a key that the schema does not have, or for a value of another type."""


def typed(values: Mapping[str, Any]) -> RunConfig:
    """The dataclass tree of plain values without references. A key that is missing has its default.

    OmegaConf could do the same, in two hundred times as long. Raises MistypedError, also for a missing key
    whose default is no value: `???`, or a reference to another key.
    """
    config = _typed(RunConfig, values)
    if missing := list(_without_value(config)):
        raise MistypedError([f"{key} is missing." for key in missing])
    return config


def _without_value(config: Any, prefix: str = "") -> Iterator[str]:
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from _without_value(value, f"{prefix}{field.name}.")
        elif value == field.default and isinstance(value, str) and value.startswith((MISSING, "${")):
            yield prefix + field.name


def strategy_of(recorded: Any) -> StrategyConfig | None:
    """The `strategy` of a recorded configuration, which may be of any type; None if it is not valid."""
    if not isinstance(recorded, dict):
        return None
    try:
        keys = _hints(StrategyConfig).keys() & recorded.keys()
        return _typed(StrategyConfig, {key: recorded[key] for key in keys})
    except MistypedError:
        return None


_SEVERAL = ("model", "data", "task")  # groups whose choices have different keys
_VARIANTS: dict[type, Mapping[str, type]] = {TaskConfig: TASKS, OptimizerConfig: OPTIMIZERS}
"""Classes whose keys depend on the `name` in them."""


def _typed(schema: type[_T], values: Any, prefix: str = "") -> _T:
    if not isinstance(values, Mapping):
        raise MistypedError([f"{prefix.removesuffix('.')} is not a table."])
    chosen: Any = _VARIANTS.get(schema, {}).get(str(values.get("name")), schema)
    hints = _hints(chosen)
    arguments: dict[str, Any] = {}
    problems: list[Problem | str] = []
    for name, value in values.items():
        hint = hints.get(name)
        if hint is None:
            problems.append(f"{prefix}{name}: there is no such key.")
        elif isinstance(hint, type) and is_dataclass(hint):
            try:
                arguments[name] = _typed(hint, value, f"{prefix}{name}.")
            except MistypedError as error:
                problems += error.problems
        else:
            arguments[name] = _as_floats(value, hint)
            if hint is not Any and not _is(arguments[name], hint):
                problems.append(_mistyped(f"{prefix}{name}", value, schema=chosen))
    if problems:
        raise MistypedError(problems)
    made: _T = chosen(**arguments)
    return made


_KINDS = {
    "int": "a whole number", "float": "a number", "bool": "true or false", "str": "one text",
    "list[int]": "a list of whole numbers [a,b]", "list[float]": "a list of numbers [a,b]",
    "list": "a list [a,b] of texts", "dict": "a table {key: value}",
}  # fmt: skip


def kind_of(required: str) -> str:
    """What a value of this type is, in words. required: the type as the schema's source spells it."""
    return next((text for start, text in _KINDS.items() if required.startswith(start)), "a value of its type")


def _mistyped(key: str, value: Any, *, schema: type) -> Problem:
    field = next(field for field in fields(schema) if field.name == key.rpartition(".")[2])
    default = default_of(field)
    has_default = default is not NO_DEFAULT and default != MISSING
    legal = (True, False) if field.type == "bool" else (default,) * has_default
    return Problem(key, value, f"is not {kind_of(str(field.type))}", legal)


@cache
def _hints(schema: type) -> dict[str, Any]:
    hints = get_type_hints(schema)
    return {field.name: hints[field.name] for field in fields(schema)}


def _as_floats(value: Any, hint: Any) -> Any:
    """Whole numbers as floats if the schema asks for floats, and text such as 1e-8, no float in YAML 1.1."""
    if hint == list[float] and isinstance(value, list):
        return [_as_floats(item, float) for item in value]
    if hint in (float, float | None) and type(value) in (int, str):
        with suppress(ValueError, OverflowError):
            return float(value)
    return value


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
        for schema in GROUPS[group].values():
            yield from _of_schema(schema, f"{group}.")


def types_of(key: str) -> list[Any]:
    """The types of one key: in `model`, `data` and `task`, one type for each choice that has the key."""
    return [_hints(schema)[key.rpartition(".")[2]] for schema in _schemas_with(key)]


def choices_of(key: str) -> tuple[str, ...]:
    """The legal words of a dotted key; empty if the key takes other values too."""
    rule = rule_of(key)
    return () if rule is None else rule.choices


def rule_of(key: str) -> Rule | None:
    rules = (rules_of(schema).get(key.rpartition(".")[2]) for schema in _schemas_with(key))
    return next((rule for rule in rules if rule is not None), None)


def _schemas_with(key: str) -> list[type]:
    """The schemas that have the key: in `model`, `data` and `task`, those of the choices that have it."""
    group, dot, rest = key.partition(".")
    schemas: list[Any] = [*GROUPS[group].values()] if dot and group in _SEVERAL else [RunConfig]
    owners: list[type] = []
    for name in (rest if schemas != [RunConfig] else key).split("."):
        tables = [schema for schema in schemas if isinstance(schema, type) and is_dataclass(schema)]
        owners = [schema for schema in tables if name in _hints(schema)]
        schemas = [_hints(schema)[name] for schema in owners]
    return owners


def _of_schema(schema: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, hint in _hints(schema).items():
        if is_dataclass(hint):
            yield from _of_schema(hint, f"{prefix}{name}.")
        elif hint is not Any or prefix:
            yield f"{prefix}{name}", hint
