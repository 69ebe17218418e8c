"""Typed records in JSON files that anybody may have written: a dataclass names the keys and their types.

`build(Failure, table)` and `read_record(Failure, path)` never raise for a value of another type. Such a value
counts as unknown, and its field keeps the default. A field is required if it has no default and its type is
not `X | None`. If a required field has no valid value, there is no record. Keys that the class does not have
are ignored, so that files of other versions can be read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from functools import cache, partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from hpc_parallel.record.safe_read import DamagedError, read_json
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.record.values import integer, number, text

T = TypeVar("T")
Reader = Callable[[Any], Any]  # gives None for a value of another type


def build(kind: type[T], value: Any) -> T | None:
    """The record in a table; None if `value` is no table, or has no valid value for a required field.

    Fields may be int, float (finite), str, bool, Path, Any, another record, `list[X]`, `tuple[X, ...]`,
    `dict[str, X]` or `Mapping[str, X]`. Items that are not an X are left out. With `X | None`, they become
    None and keep their place. A named tuple is a list in the file, with a value for each of its fields.
    `Annotated[X, function]` applies the function to the raw value first. The function returns None to refuse
    the value. `Annotated[tuple[X, ...], WHOLE]` counts as unknown if any item is not an X.
    """
    if not isinstance(value, dict):
        return None
    arguments: dict[str, Any] = {}
    for name, reader, is_optional, has_default in _fields(kind):  # type: ignore[arg-type]  # is hashable
        if (item := reader(value.get(name))) is not None:
            arguments[name] = item
        elif is_optional and (not has_default or value.get(name, MISSING) is None):
            arguments[name] = None
        elif not has_default:
            return None
    return kind(**arguments)


def read_record(kind: type[T], path: Path) -> T | None:
    """The record in a JSON file; None if there is no file. Raises DamagedError."""
    if (values := read_json(path)) is None:
        return None
    if (record := build(kind, values)) is None:
        raise DamagedError(path, "a value that it needs is missing or of another type")
    return record


def read_if_possible(kind: type[T], path: Path) -> T | None:
    """The record in a JSON file; None if there is no file or it can't be read."""
    try:
        return read_record(kind, path)
    except (OSError, ValueError):
        return None


def write_record(path: Path, record: Any) -> None:
    """Replace the file atomically by the record. The file has all fields in their order."""
    write_json(path, asdict(record))


class _Whole:
    """The class of WHOLE, a mark for `Annotated`."""


WHOLE = _Whole()


def first(count: int) -> Reader:
    """For `Annotated`: read only the first `count` items of a list."""
    return lambda value: value[:count] if isinstance(value, list) else None


def _path(value: Any) -> Path | None:
    """A path that the system accepts."""
    if not isinstance(value, str) or "\0" in value:
        return None
    try:
        os.fsencode(value)
    except UnicodeEncodeError:
        return None
    return Path(value)


_PLAIN: Mapping[Any, Reader] = {
    int: integer, float: number, str: text, Path: _path, Any: lambda value: value,
    bool: lambda value: value if isinstance(value, bool) else None,
}  # fmt: skip


@cache
def _fields(kind: Any) -> list[tuple[str, Reader, bool, bool]]:
    """For each field: its name, its reader, whether it may be None, and whether it has a default."""
    hints = get_type_hints(kind, include_extras=True)
    return [
        (field.name, _reader(hints[field.name]), _is_optional(hints[field.name]),
         field.default is not MISSING or field.default_factory is not MISSING)
        for field in fields(kind)
    ]  # fmt: skip


def _is_optional(hint: Any) -> bool:
    return NoneType in get_args(hint)


def _may_be_none(hint: Any) -> bool:
    """Whether null is a valid value of these items, not an unknown one."""
    return hint is Any or _is_optional(hint)


def _reader(hint: Any) -> Reader:
    origin, parts = get_origin(hint), get_args(hint)
    if hint in _PLAIN:
        return _PLAIN[hint]
    if origin is Annotated:
        return _prepared(_reader(parts[0]), parts[1:])
    if origin in (Union, UnionType):  # X | None
        (inner,) = (part for part in parts if part is not NoneType)
        return _reader(inner)
    if origin in (list, tuple):
        return partial(_items, origin, _reader(parts[0]), _may_be_none(parts[0]))
    if origin in (dict, Mapping):
        return partial(_entries, _reader(parts[1]), _may_be_none(parts[1]))
    if issubclass(hint, tuple):
        return partial(_named_tuple, hint)
    return partial(build, hint)


def _prepared(reader: Reader, marks: Sequence[Any]) -> Reader:
    for mark in reversed(marks):
        reader = partial(_whole, reader) if mark is WHOLE else partial(_after, mark, reader)
    return reader


def _whole(reader: Reader, values: Any) -> Any:
    items = reader(values)
    return items if items is not None and len(items) == len(values) else None


@cache
def _columns(kind: Any) -> list[tuple[Reader, bool]]:
    """For each field of a named tuple: its reader, and whether it may be None."""
    return [(_reader(hint), _is_optional(hint)) for hint in get_type_hints(kind).values()]


def _named_tuple(kind: Any, values: Any) -> Any:
    columns = _columns(kind)
    if not isinstance(values, list) or len(values) != len(columns):
        return None
    items = [reader(value) for (reader, _), value in zip(columns, values, strict=True)]
    if any(item is None and not (optional and value is None)
           for item, (_, optional), value in zip(items, columns, values, strict=True)):  # fmt: skip
        return None
    return kind(*items)


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
