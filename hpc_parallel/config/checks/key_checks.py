"""Check each value by the rule at its key (`rules.py`), and that no integer is huge."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from hpc_parallel.config.checks.suggestions import schedules_near
from hpc_parallel.config.key_suggestions import choice_near
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.layout.axes import AXES
from hpc_parallel.layout.model_data_schema import DATA, MODELS, schema_of
from hpc_parallel.problems import Problem
from hpc_parallel.record.safe_read import MAX_INTEGER
from hpc_parallel.rules import Part, leaves, refused, ruled

COUNTED = ("model", "strategy", "training", "optimizer", "launcher", "task")  # tables of counts
NAMES = {schema: name for name, schema in (MODELS | DATA).items()}
EXAMPLES = {"transformer": "tiny", "moe": "moe_tiny"}  # files of schemas that have another name
MOST_COUNT, MOST_INTEGER = 2**31, MAX_INTEGER


def find_problems(config: RunConfig) -> Iterator[Problem]:
    has_open_axis = -1 in (getattr(config.strategy, axis) for axis in AXES)
    for key, value, rule in refused(_parts(config)):
        legal = tuple(choice_near(key, str(value), rule.choices, most=1)) or rule.legal
        if key == "strategy.schedule":
            legal = schedules_near(value) or legal
        if key.removeprefix("strategy.") in AXES:
            legal = (1,) if has_open_axis else (-1,)  # -1, what is left, can be the degree of one axis only
            has_open_axis = True
        yield Problem(key, value, rule.text, legal)


def foreign_tables(config: RunConfig) -> Iterator[str]:
    """A class of ours needs a table with its own keys: `model._target_=...` alone changes none of them."""
    for prefix, table, schema in _parts(config):
        if schema is not None and (choice := NAMES.get(schema)) is not None:
            group, needed = prefix.rstrip("."), {item.name for item in fields(schema)}
            missing, unknown = _names(needed - table.keys()), _names(table.keys() - needed)
            reasons = [f"it needs {missing}"] * bool(missing) + [f"it has no {unknown}"] * bool(unknown)
            if reasons:
                place = f"{group}._target_ = {table['_target_']} does not fit the other keys of {group}"
                yield f"{place}: {'; '.join(reasons)}. Try {group}={EXAMPLES.get(choice, choice)}."


def _names(keys: set[Any]) -> str:
    """Sorted, without those that Hydra reads."""
    return ", ".join(sorted(name for name in map(str, keys) if not name.startswith("_")))


def huge_integers(config: RunConfig) -> Iterator[Problem]:
    """Integers beyond any real run, or beyond what a file of the run can hold."""
    limits = {key: rule.most for key, _, rule in ruled(_parts(config)) if rule.most}
    for key, value in leaves(vars(config)):
        if isinstance(value, int):
            most = limits.get(key, MOST_COUNT if key.partition(".")[0] in COUNTED else MOST_INTEGER)
            bound, limit = (most, "most") if value > 0 else (-most, "least")
            if abs(value) > most:
                legal = () if key.endswith("]") or value < 0 else (bound,)
                yield Problem(key, value, f"must be at {limit} {bound}", legal)


def sizes_are_legal(config: RunConfig) -> bool:
    """Whether all whole numbers of the model and the data follow their rules."""
    parts = [part for part in _parts(config) if part[0] in ("model.", "data.")]
    return not any(isinstance(value, int | list) for _, value, _ in refused(parts))


def _parts(config: RunConfig) -> list[Part]:
    return [("", vars(config), RunConfig)] + [
        (f"{group}.", part, schema_of(group, part.get("_target_"))) if isinstance(part, dict)
        else (f"{group}.", vars(part), type(part))
        for group, part in vars(config).items() if isinstance(part, dict) or is_dataclass(part)
    ]  # fmt: skip
