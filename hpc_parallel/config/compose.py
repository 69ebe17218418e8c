"""A composed configuration made plain and typed, with what is missing or unknown in it."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hpc_parallel.config.problems import ConfigError, Problem
from hpc_parallel.config.schema import RunConfig, TransformerConfig, typed

REQUIRED = {"data.path": "tokens.npy"}  # keys without a default, with an example


def find_folder(name: str) -> Path:
    """`conf` or `sbatch_templates`: beside the package in a checkout, inside it when installed."""
    package = Path(__file__).resolve().parents[1]
    beside = package.parent / name
    return beside if (package.parent / "pyproject.toml").exists() else package / name


def resolve(config: DictConfig) -> tuple[RunConfig, dict[str, Any]]:
    """The typed configuration, and the same as plain values for `config.yaml`.

    Raises ConfigError with every key that is missing or that no schema has.
    """
    problems: list[Problem | str] = [
        f"{key} has no value and no default. Try {key}={REQUIRED.get(key, 'VALUE')}."
        for key in sorted(OmegaConf.missing_keys(config))
    ]
    problems += [f"+{key}: there is no key {key}." for key in unknown_keys(config)]
    if problems:
        raise ConfigError(problems)
    try:
        values: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
        return typed(values), values
    except OmegaConfBaseException as error:
        raise ConfigError([f"{error.full_key}: {str(error).splitlines()[0]}."]) from error


def unknown_keys(config: DictConfig, prefix: str = "") -> list[str]:
    """Dotted names of keys that a schema doesn't have (Hydra's `+` lets them through)."""
    found: list[str] = []
    schema = OmegaConf.get_type(config)
    known = {field.name for field in fields(schema)} if is_dataclass(schema) else None
    if schema is TransformerConfig and config.get("_target_") != TransformerConfig._target_:
        known = None  # a class of the user's own takes what it likes
    for key, child in children(config):
        if known is not None and key not in known:
            found.append(f"{prefix}{key}")
        elif isinstance(child, DictConfig):
            found += unknown_keys(child, f"{prefix}{key}.")
    return found


def children(config: DictConfig) -> list[tuple[str, Any]]:
    """Keys and values without resolving interpolations; a value that is missing or null reads None."""
    pairs: list[tuple[str, Any]] = []
    for key in config:
        node = config._get_node(key)
        empty = node is None or node._is_none() or node._is_missing() or node._is_interpolation()
        pairs.append((str(key), None if empty else node))
    return pairs
