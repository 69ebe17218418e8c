"""A configuration that Python code holds, made into a run whose recorded overrides compose to it.

`resume` and `rerun` start from the overrides of a run. A configuration may have been changed after it was
composed (`config.nodes = 4`), and then its overrides alone would be wrong. So they are composed again, and
each value that differs becomes one more override. A value that no override gives is refused. Thus a run
never has another configuration than its record says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from numbers import Integral, Real
from pathlib import Path, PurePath
from typing import Any

from hpc_parallel.config.command_line import CommandLine
from hpc_parallel.config.compose import resolve
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.config.sweep_compose import compose_run
from hpc_parallel.launch.checked_run import telling_all
from hpc_parallel.launch.prepare import PreparedRun, prepare
from hpc_parallel.problems import ConfigError, Problem, quoted
from hpc_parallel.record.recorded_start import key_of
from hpc_parallel.record.values import flatten

_ROUNDS = 4  # a change may change what follows from it (`name` from `strategy.name`), which is set back then
_BARE = re.compile(r"(?!(?:null|true|false|nan|inf)$)[A-Za-z_][\w.-]*", re.ASCII | re.IGNORECASE)
_KEPT_AT = "_origin"  # an attribute and no field: neither compared nor written to config.yaml


@dataclass(frozen=True)
class Origin:
    """What a configuration was composed from."""

    overrides: tuple[str, ...] = ()
    config_dir: Path | None = None


def remember(config: RunConfig, origin: Origin) -> None:
    """Keep the origin with the configuration; copies (`copy.deepcopy`) have it as well."""
    vars(config)[_KEPT_AT] = origin


def recompose(config: RunConfig) -> PreparedRun:
    """The checked run of `config` as it is now.

    A configuration without an origin (`RunConfig(...)`, `dataclasses.replace`) is compared with the
    defaults. Raises ConfigError with all problems.
    """
    origin: Origin = vars(config).get(_KEPT_AT, Origin())
    flags = ["--config-dir", str(origin.config_dir)] if origin.config_dir else []
    wanted = _plain(config)
    words = origin.overrides
    for _ in range(_ROUNDS):
        line = CommandLine.parse([*flags, *words])
        with telling_all(line):
            cell = compose_run(line.overrides, **line.places)
            given = resolve(cell.config)[1]
            if given == wanted:
                return prepare(cell.config, overrides=cell.overrides, config_dir=line.extra_dir)
        words = _with_changes(words, given, wanted)
    raise ConfigError(_inexpressible(given, wanted))


def _plain(value: Any) -> Any:
    """The plain value of a configuration's part; attributes that no schema has are kept, to be refused."""
    if is_dataclass(value):
        return {name: _plain(item) for name, item in vars(value).items() if name != _KEPT_AT}
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, PurePath):
        return str(value)
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):  # NumPy's too
        return int(value)
    return float(value) if isinstance(value, Real) else value


def _with_changes(
    words: Sequence[str], given: Mapping[str, Any], wanted: Mapping[str, Any]
) -> tuple[str, ...]:
    """The words with one for each value of `wanted` that is not in `given`."""
    values = _changed(given, wanted)
    if not values:  # keys that were taken away, or empty tables: no override says so
        raise ConfigError(_inexpressible(given, wanted))
    kept = [word for word in words if word.startswith("~") or key_of(word) not in values]
    added = {key_of(word) for word in words if word.startswith("+")} | (values.keys() - flatten(given).keys())
    new = [f"{'+' * (key in added)}{key}={_spelled(value)}" for key, value in values.items()]
    return (*kept, *new)


def _changed(given: Mapping[str, Any], wanted: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of `wanted` that are not in `given`, by dotted keys."""
    values: dict[str, Any] = {}
    for key, value in wanted.items():
        before = given.get(key)
        if isinstance(before, dict) and isinstance(value, dict):
            values |= _changed(before, value, f"{prefix}{key}.")
        elif key not in given or before != value:
            values[f"{prefix}{key}"] = value
    return values


def _inexpressible(given: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[Problem | str]:
    rule = "was set in Python, and no override gives it. Try compose() with overrides that do"
    problems: list[Problem | str] = [
        Problem(key, value, rule) for key, value in _changed(given, wanted).items()
    ]
    taken = flatten(_changed(wanted, given)).keys() - flatten(wanted).keys()
    problems += [
        f"{key} was taken away in Python, and its overrides give it. Try compose() without them."
        for key in sorted(taken)
    ]
    return problems or ["The configuration was changed in a way that no override gives. Try compose() again."]


def _spelled(value: Any) -> str:
    """The value as Hydra's grammar of overrides reads it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value if _BARE.fullmatch(value) else quoted(value)
    if isinstance(value, list):
        return f"[{','.join(map(_spelled, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_spelled(item)}' for key, item in value.items())}}}"
    return repr(value) if isinstance(value, int | float) else quoted(value)
