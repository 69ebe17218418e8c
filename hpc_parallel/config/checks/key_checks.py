"""Check each value by the rule at its key (`config/rules.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from hpc_parallel.config.key_suggestions import choice_near
from hpc_parallel.config.model_data_schema import schema_of
from hpc_parallel.config.rules import Rule, default_of, rules_of
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.problems import Problem


def find_problems(config: RunConfig) -> Iterator[Problem]:
    for key, value, rule in ruled_values(config):
        if value is not None and not rule.allows(value):
            near = choice_near(key, str(value), rule.choices, most=1)
            yield Problem(key, value, rule.text, tuple(near) or rule.legal)


def ruled_values(config: RunConfig) -> Iterator[tuple[str, Any, Rule]]:
    """Yields (dotted key, value, rule) for every key that has a rule."""
    values = vars(config)
    yield from ((key, values[key], rule) for key, rule in rules_of(RunConfig).items())
    for group, part in values.items():
        if isinstance(part, dict):
            yield from _ruled_part(group, part, schema_of(group, part.get("_target_")))
        elif is_dataclass(part):
            yield from _ruled_part(group, vars(part), type(part))


def _ruled_part(group: str, part: dict[str, Any], schema: type | None) -> Iterator[tuple[str, Any, Rule]]:
    rules = rules_of(schema) if schema is not None else {}
    return ((f"{group}.{key}", part[key], rule) for key, rule in rules.items() if key in part)


def sizes_are_legal(config: RunConfig) -> bool:
    """Whether all whole numbers of the model and the data follow their rules."""
    parts = {"model": config.model, "data": config.data}
    return all(
        rule.allows(value)
        for group, part in parts.items() if isinstance(part, dict)
        for _, value, rule in _ruled_part(group, part, schema_of(group, part.get("_target_")))
        if isinstance(value, int | list)
    )  # fmt: skip


@cache
def choices_of(key: str) -> tuple[str, ...]:
    """The legal words of a dotted key; empty if it takes others too."""
    schema: Any = RunConfig
    *groups, name = key.split(".")
    for group in groups:
        parts = {item.name: default_of(item) for item in fields(schema)}
        schema = type(parts.get(group))
        if not is_dataclass(schema):
            return ()
    rule = rules_of(schema).get(name)
    return rule.choices if rule is not None else ()
