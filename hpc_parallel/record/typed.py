"""Typed records in JSON files that anybody may have written: a dataclass names the keys and their types.

`build(Failure, table)` and `read_record(Failure, path)` never raise for a value of another type: such a
value is unknown, and its field keeps the default. A field without a default, and not of a type `X | None`,
is needed: without a valid value for it there is no record. Keys that the class does not have are ignored, so
that files of other versions can be read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, asdict, fields
from functools import cache, partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from hpc_parallel.record.safe_read import DamagedError, read_json
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.record.values import integer, number, text

T = TypeVar("T")
Reader = Callable[[Any], Any]  # gives None for a value of another type
_NEEDED, _DEFAULT = object(), object()  # what a field is without a valid value


def build(kind: type[T], value: Any) -> T | None:
    """The record in a table; None if it is no table, or lacks a valid value for a field that is needed.

    Fields may be int, float (finite), str, bool, Any, another record, `list[X]`, `tuple[X, ...]`,
    `dict[str, X]` or `Mapping[str, X]`. Items that are no X are left out; with `X | None` they are None and
    keep their place. `Annotated[X, function]` applies the function to the raw value first; it returns None to
    refuse it.
    """
    if not isinstance(value, dict):
        return None
    arguments: dict[str, Any] = {}
    for name, reader, otherwise in _fields(kind):  # type: ignore[arg-type]  # mypy: a class is hashable
        if (item := reader(value.get(name))) is not None:
            arguments[name] = item
        elif otherwise is _NEEDED:
            return None
        elif otherwise is None:
            arguments[name] = None
    return kind(**arguments)


def read_record(kind: type[T], path: Path) -> T | None:
    """The record in a JSON file; None if there is no file. Raises DamagedError."""
    if (values := read_json(path)) is None:
        return None
    if (record := build(kind, values)) is None:
        raise DamagedError(path, "a value that it needs is missing or of another type")
    return record


def write_record(path: Path, record: Any) -> None:
    """Replace the file atomically by the record, all fields in their order."""
    write_json(path, asdict(record))


def first(count: int) -> Reader:
    """For `Annotated`: only this many items of a list are read."""
    return lambda value: value[:count] if isinstance(value, list) else None


def _truth(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


_PLAIN: Mapping[Any, Reader] = {
    int: integer, float: number, str: text, bool: _truth, Any: lambda value: value,
}  # fmt: skip


@cache
def _fields(kind: Any) -> list[tuple[str, Reader, Any]]:
    """Name and reader of each field, and what it is without a valid value: _DEFAULT, None or _NEEDED."""
    hints = get_type_hints(kind, include_extras=True)
    return [(field.name, _reader(hints[field.name]), _otherwise(field, hints)) for field in fields(kind)]


def _otherwise(field: Field[Any], hints: Mapping[str, Any]) -> Any:
    if field.default is not MISSING or field.default_factory is not MISSING:
        return _DEFAULT
    return None if _is_optional(hints[field.name]) else _NEEDED


def _is_optional(hint: Any) -> bool:
    return NoneType in get_args(hint)


def _reader(hint: Any) -> Reader:
    origin, parts = get_origin(hint), get_args(hint)
    if hint in _PLAIN:
        return _PLAIN[hint]
    if origin is Annotated:
        return partial(_after, parts[1], _reader(parts[0]))
    if origin in (Union, UnionType):  # X | None
        (inner,) = (part for part in parts if part is not NoneType)
        return _reader(inner)
    if origin in (list, tuple):
        return partial(_items, origin, _reader(parts[0]), _is_optional(parts[0]))
    if origin in (dict, Mapping):
        return partial(_entries, _reader(parts[1]), _is_optional(parts[1]))
    return partial(build, hint)


def _after(prepare: Reader, reader: Reader, value: Any) -> Any:
    return None if (prepared := prepare(value)) is None else reader(prepared)


def _items(kind: Callable[..., T], reader: Reader, keep_unknown: bool, values: Any) -> T | None:
    if not isinstance(values, list):
        return None
    return kind(item for item in map(reader, values) if keep_unknown or item is not None)


def _entries(reader: Reader, keep_unknown: bool, values: Any) -> dict[str, Any] | None:
    if not isinstance(values, dict):
        return None
    entries = ((key, reader(value)) for key, value in values.items() if isinstance(key, str))
    return {key: item for key, item in entries if keep_unknown or item is not None}
