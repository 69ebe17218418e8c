"""Rules for the value of one key. A rule is in the metadata of the key's field.

    steps: int = key(100, count())  # The number of optimizer steps.

`checks/key_checks.py` applies the rules, and docs/configuration.md shows them. A rule for several keys is a
function in `checks/`, and `checks/all_checks.py` lists these functions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from functools import cache
from typing import Any

RULE = "rule"  # the name in the metadata of a field


@dataclass(frozen=True)
class Rule:
    """A rule for the values of one key. null is legal wherever the type of the key allows it.

    allows: whether a value is legal.
    text: what a problem says after the key and its value.
    legal: values to suggest; if empty, the default of the key.
    choices: the legal words, if there are few of them; the nearest one is suggested.
    most: the largest integer. Larger ones are reported alone, because other checks loop up to the value.
    """

    allows: Callable[[Any], bool]
    text: str
    legal: tuple[Any, ...] = ()
    choices: tuple[str, ...] = ()
    most: int | None = None


def key(default: Any, rule: Rule, *, legal: Any = ()) -> Any:
    """A key of a configuration class: its default and its rule.

    legal: the value to suggest in place of the rule's `legal`, or a tuple of several values.
    """
    suggestions = legal if isinstance(legal, tuple) else (legal,)
    metadata = {RULE: replace(rule, legal=suggestions or rule.legal)}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def count(*, most: int | None = None) -> Rule:
    """A whole number of at least 1."""
    return replace(at_least(1), legal=(1,), most=most)


def at_least(least: float, *, finite: bool = True) -> Rule:
    return _number(lambda value: value >= least, f"must be at least {least}", finite=finite)


def above(bound: float, *, finite: bool = True) -> Rule:
    return _number(lambda value: value > bound, f"must be above {bound}", finite=finite)


def between(least: float, most: float) -> Rule:
    """A number of the interval, with both ends."""
    return _number(lambda value: least <= value <= most, f"must lie between {least:g} and {most:g}")


def inside(least: float, most: float) -> Rule:
    """A number of the interval, without its ends."""
    return _number(lambda value: least < value < most, f"must lie between {least:g} and {most:g}")


def _number(allows: Callable[[float], bool], text: str, *, finite: bool = True) -> Rule:
    """A rule for numbers. If the key has a type, the type refuses other values."""

    def is_legal(value: Any) -> bool:
        if not isinstance(value, int | float):
            return True
        return allows(value) and (math.isfinite(value) or not finite)

    return Rule(is_legal, text)


def one_of(*choices: str, file: str | None = None) -> Rule:
    """One of the words, or with `file`, the path of a file that ends in it."""
    rule = f"is not one of {', '.join(choices)}" + (f", nor a {file} file" if file else "")
    return Rule(
        lambda value: value in choices or (file is not None and value.endswith(file)),
        rule, () if file else choices[:1], choices,
    )  # fmt: skip


def matches(pattern: str, text: str) -> Rule:
    """A text that the regular expression matches from start to end."""
    return Rule(lambda value: re.fullmatch(pattern, value, re.ASCII) is not None, text)


def line(text: str = "must be one printable line") -> Rule:
    """One printable line that is not empty."""
    return Rule(lambda value: value.isprintable() and bool(value.strip()), text)


def some_of(*choices: str) -> Rule:
    """A list of some of the words."""
    rule = f"must name some of {', '.join(choices)}"
    return Rule(lambda names: names != [] and set(names) <= set(choices), rule, ([choices[0]],))


@cache
def rules_of(schema: type) -> Mapping[str, Rule]:
    """The rules of the keys of a class. A subclass that changes a default keeps the rule."""
    rules: dict[str, Rule] = {}
    for owner in reversed(schema.__mro__):
        if is_dataclass(owner):
            rules |= {item.name: item.metadata[RULE] for item in fields(owner) if RULE in item.metadata}
    defaults = {item.name: (default_of(item),) for item in fields(schema) if item.name in rules}
    return {name: replace(rule, legal=rule.legal or defaults[name]) for name, rule in rules.items()}


Part = tuple[str, Mapping[str, Any], type | None]  # the prefix of its keys, its values, and their schema


def ruled(parts: Sequence[Part]) -> list[tuple[str, Any, Rule]]:
    """(dotted key, value, rule) of every key that has a rule."""
    return [(prefix + key, values[key], rule) for prefix, values, schema in parts if schema is not None
            for key, rule in rules_of(schema).items() if key in values]  # fmt: skip


def refused(parts: Sequence[Part]) -> list[tuple[str, Any, Rule]]:
    """Those of `ruled` whose value is illegal."""
    return [each for each in ruled(parts) if each[1] is not None and not each[2].allows(each[1])]


def leaves(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """(dotted key, value) of all values of nested classes, tables and lists, and of these."""
    nested = [*values.items()]
    for key, value in nested:  # which grows
        table = vars(value) if is_dataclass(value) else value
        if isinstance(table, dict):
            nested += [(f"{key}.{name}", item) for name, item in table.items()]
        elif isinstance(value, list | tuple):
            nested += [(f"{key}[{index}]", item) for index, item in enumerate(value)]
    return nested


def default_of(item: Field[Any]) -> Any:
    """The default of a field; `dataclasses.MISSING` if it has none."""
    return item.default if item.default_factory is MISSING else item.default_factory()
