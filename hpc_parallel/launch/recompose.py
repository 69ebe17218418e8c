"""Prepares a run from a RunConfig, with recorded overrides that compose to exactly that configuration.

`resume` and `rerun` start from the overrides of a run. If Python code changed the configuration after it was
composed (`config.nodes = 4`), the overrides alone would be wrong. Therefore they are composed again, and each
value that differs becomes one more override. A value that no override can set is refused. A run therefore
always has the configuration that its record describes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from numbers import Integral, Real
from pathlib import Path, PurePath
from typing import Any

from hpc_parallel.config.command_line import CommandLine
from hpc_parallel.config.compose import compose_run
from hpc_parallel.config.node_devices import AUTO, choose_launcher
from hpc_parallel.config.resolve import resolve
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.launch.checked_run import reporting_all_problems
from hpc_parallel.launch.prepare import PreparedRun, prepare
from hpc_parallel.problems import ConfigError, Problem, hydra_value
from hpc_parallel.record.recorded_start import key_of
from hpc_parallel.record.values import flatten

_MAX_ROUNDS = 4  # an override may change a derived value (`name`), which the next round resets
_ORIGIN = "_origin"  # an attribute, not a field, so it is neither compared nor written to config.yaml


@dataclass(frozen=True)
class Origin:
    """The overrides and the folder that a configuration was composed from."""

    overrides: tuple[str, ...] = ()
    config_dir: Path | None = None


def remember(config: RunConfig, origin: Origin) -> None:
    """Store the origin in the configuration; copies (`copy.deepcopy`) have it too."""
    vars(config)[_ORIGIN] = origin


def recompose(config: RunConfig) -> PreparedRun:
    """The checked run of `config` with its current values.

    A configuration without an origin (`RunConfig(...)`, `dataclasses.replace`) is compared with the
    defaults. Raises ConfigError with all problems.
    """
    origin: Origin = vars(config).get(_ORIGIN, Origin())
    flags = ["--config-dir", str(origin.config_dir)] if origin.config_dir else []
    target = _plain(config)
    launcher = target.get("launcher")
    if isinstance(launcher, dict) and launcher.get("kind") == AUTO:  # set after `compose`, or never composed
        launcher["kind"] = choose_launcher(AUTO)[0]
    overrides = origin.overrides
    for _ in range(_MAX_ROUNDS):
        line = CommandLine.parse([*flags, *overrides])
        with reporting_all_problems(line):
            cell = compose_run(line.overrides, **line.places)
            composed = resolve(cell.config).values
            if composed == target:
                return prepare(cell.config, overrides=cell.overrides, config_dir=line.extra_dir)
        overrides = _with_changes(overrides, composed, target)
    raise ConfigError(_inexpressible(composed, target))


def _plain(value: Any) -> Any:
    """The plain value of a configuration's part. Attributes outside the schema stay and are refused later."""
    if is_dataclass(value):
        return {name: _plain(item) for name, item in vars(value).items() if name != _ORIGIN}
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, PurePath):
        return str(value)
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):  # also NumPy's integers
        return int(value)
    return float(value) if isinstance(value, Real) else value


def _with_changes(
    overrides: Sequence[str], composed: Mapping[str, Any], target: Mapping[str, Any]
) -> tuple[str, ...]:
    """The overrides, plus one for each value of `target` that is missing or different in `composed`."""
    values = _changed(composed, target)
    if not values:  # removed keys or empty tables, which no override can express
        raise ConfigError(_inexpressible(composed, target))
    kept = [override for override in overrides if override.startswith("~") or key_of(override) not in values]
    added_keys = {key_of(override) for override in overrides if override.startswith("+")}
    added_keys |= values.keys() - flatten(composed).keys()
    new = [f"{'+' * (key in added_keys)}{key}={hydra_value(value)}" for key, value in values.items()]
    return (*kept, *new)


def _changed(composed: Mapping[str, Any], target: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of `target` that are missing or different in `composed`, by dotted keys."""
    values: dict[str, Any] = {}
    for key, value in target.items():
        before = composed.get(key)
        if isinstance(before, dict) and isinstance(value, dict):
            values |= _changed(before, value, f"{prefix}{key}.")
        elif key not in composed or before != value:
            values[f"{prefix}{key}"] = value
    return values


def _inexpressible(composed: Mapping[str, Any], target: Mapping[str, Any]) -> list[Problem | str]:
    rule = "was set in Python as a {}, but no override can set it. Try compose() with overrides that do"
    problems: list[Problem | str] = [
        Problem(key, value, rule.format(type(value).__name__))
        for key, value in _changed(composed, target).items()
    ]
    removed = flatten(_changed(target, composed)).keys() - flatten(target).keys()
    problems += [
        f"{key} was removed in Python, but an override sets it. Try compose() without that override."
        for key in sorted(removed)
    ]
    return problems or ["No override can express how the configuration was changed. Try compose() again."]
