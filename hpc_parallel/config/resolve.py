"""Replace each `auto` in a composed configuration and give it types, or find missing and unknown keys."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hpc_parallel.config.gpu_defaults import OF_CPUS, default_precision, default_share
from hpc_parallel.config.key_suggestions import suggest
from hpc_parallel.config.node_devices import AUTO, choose_launcher, devices_of_a_node
from hpc_parallel.config.schema import RunConfig, StrategyConfig
from hpc_parallel.config.script import KINDS, NODE, RANKS, TASK, TORCHRUN, name_of
from hpc_parallel.config.task_schema import JOB_SECONDS, LOCAL_SECONDS
from hpc_parallel.config.typed_config import filled, typed
from hpc_parallel.layout.batch_plan import default_batch_size, usual_batch_size
from hpc_parallel.layout.layout import DATAPARALLEL, SPMD
from hpc_parallel.problems import ConfigError, Problem
from hpc_parallel.slurm.limits import NodeShare

# Keys without a default, with an example.
REQUIRED = {"cluster.name": "mysite", "data.path": "tokens.npy", "data.dataset._target_": "mydata.MyDataset"}


class UnresolvedError(ConfigError):
    """Keys are missing or unknown, so the other checks did not run. `diagnose` runs them."""


class Resolved(NamedTuple):
    """A configuration without `auto`, except where only the job can know the value."""

    config: RunConfig
    values: dict[str, Any]  # the same configuration as plain values, for `config.yaml`
    launcher_reason: str  # why `launcher.kind=auto` chose this launcher; empty if the user chose it


def resolve(config: DictConfig, *, preset: Mapping[str, Any] = MappingProxyType({})) -> Resolved:
    """Replace each `auto` and give the configuration its types.

    preset: values that are already known, by dotted key.

    Raises UnresolvedError with every key that is missing or unknown to the schemas.
    """
    config = with_values(config, preset)  # the only copy, as it takes as long as all defaults below
    launcher_reason = _set_launcher(config)  # first: the other defaults depend on it
    for set_default in (_set_devices, _set_gpu_defaults, _set_script, _set_batch, _set_time_budget):
        set_default(config)
    if (run := _resolve_valid(config)) is not None:
        return Resolved(run, asdict(run), launcher_reason)
    problems: list[Problem | str] = [
        f"{key} has no value and no default. Try {key}={REQUIRED.get(key, 'VALUE')}."
        for key in missing_keys(config)
    ]
    for key in unknown_keys(config):
        close = suggest(key, flat(config))
        problems.append(f"+{key}: there is no key {key}." + (f" Did you mean {close}?" if close else ""))
    if problems:
        raise UnresolvedError(problems)
    try:
        run = typed(OmegaConf.to_container(config, resolve=True))
        return Resolved(run, asdict(run), launcher_reason)
    except OmegaConfBaseException as error:
        raise UnresolvedError([f"{error.full_key}: {str(error).splitlines()[0].rstrip('.')}."]) from error


def _set_launcher(config: DictConfig) -> str:
    """Set the launcher that `launcher.kind=auto` means here; returns the reason."""
    try:
        kind, reason = choose_launcher(config.launcher.kind)
    except OmegaConfBaseException:  # `resolve` reports it with all other keys
        return ""
    if reason:
        config.launcher.kind = kind
    return reason


def _set_devices(config: DictConfig) -> None:
    """Set a number for `gpus_per_node=auto`. Raises UnresolvedError."""
    if OmegaConf.is_interpolation(config, "gpus_per_node") or config.get("gpus_per_node") != AUTO:
        return
    try:
        # Only these two keys: another key may refer to `gpus_per_node`.
        launcher = {key: config.launcher[key] for key in ("kind", "partition")}
        cluster = OmegaConf.to_container(config.cluster, resolve=True)
        devices = devices_of_a_node({"device": config.device, "launcher": launcher, "cluster": cluster})
    except OmegaConfBaseException:  # `resolve` reports it with all other keys
        devices = 1
    except ConfigError as error:
        raise UnresolvedError(error.problems) from error
    config.gpus_per_node = devices


def _set_gpu_defaults(config: DictConfig) -> None:
    """Set a precision, and each device's share of a node's cores and memory."""
    shares = ("cpus_per_device", "memory_gb_per_device")
    try:
        values = {
            "device": config.device,
            "launcher": {key: config.launcher[key] for key in ("kind", "partition")},
            "cluster": {key: config.cluster[key] for key in ("gpus", "gpu_type")},
            "flags": [*config.cluster.extra, *config.launcher.extra],
        }
        precision = config.training.precision or default_precision(values)
        share = default_share(values) if config.cluster.cpus_per_device is None else NodeShare()
    except OmegaConfBaseException:  # `resolve` reports it with all other keys
        precision, share = OF_CPUS, NodeShare()
    config.training.precision = precision
    if config.training.compile == AUTO:
        config.training.compile = config.training.speed == "max"
    for key, value in zip(shares, (share.cpus, share.memory_gb), strict=True):
        if OmegaConf.select(config, f"cluster.{key}") is None:
            OmegaConf.update(config, f"cluster.{key}", value)


def _set_script(config: DictConfig) -> None:
    """For `task=script`, set a name after the script, and the processes to start in place of a strategy."""
    if OmegaConf.select(config, "task.name", default=None) != TASK:
        return
    try:
        script = {key: config.script[key] for key in KINDS}
        devices, start = config.nodes * config.gpus_per_node, config.script.start
        of_site = config.cluster.start
    except OmegaConfBaseException:  # `resolve` reports it with all other keys
        return
    if OmegaConf.is_interpolation(config, "name"):
        config.name = name_of(script)
    execution = DATAPARALLEL if start == NODE else SPMD  # NODE: one process drives all devices of a node
    config.strategy = OmegaConf.structured(StrategyConfig(name=TASK, replicate=-1, execution=execution))
    if start != RANKS and of_site != "mpirun":
        config.cluster.start = TORCHRUN if start == TORCHRUN else "srun"
    config.training.global_batch_size = max(1, devices)


def _set_batch(config: DictConfig) -> None:
    """Set a number for `training.global_batch_size`."""
    if OmegaConf.select(config, "training.global_batch_size", default=0) is not None:
        return
    try:
        values = OmegaConf.to_container(config, resolve=True)
        size = default_batch_size(cast(dict[str, Any], values))
    except (OmegaConfBaseException, KeyError):  # `resolve` reports it with all other keys
        size = usual_batch_size(OmegaConf.select(config, "model"))
    config.training.global_batch_size = size


def _set_time_budget(config: DictConfig) -> None:
    """Set a number for `task.seconds`, if the task has this key."""
    if OmegaConf.select(config, "task.seconds", default=0) is not None:
        return
    try:
        is_local = config.launcher.kind == "local"
        seconds = LOCAL_SECONDS if is_local else min(JOB_SECONDS, 30.0 * config.launcher.time_minutes)
    except OmegaConfBaseException:  # `resolve` reports it with all other keys
        return
    config.task.seconds = seconds


def with_values(config: DictConfig, values: Mapping[str, Any]) -> DictConfig:
    """A copy of the configuration with these values, by dotted key."""
    config = copy.deepcopy(config)
    for key, value in values.items():
        OmegaConf.update(config, key, value)
    return config


def _resolve_valid(config: DictConfig) -> RunConfig | None:
    """A fast path for large sweeps: None if a value is missing, unknown or of another type."""
    if any(unknown_keys(config[key]) for key in ("model", "data") if OmegaConf.is_dict(config.get(key))):
        return None
    try:
        values = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException:
        return None
    return None if _has_missing(values) else filled(values)


def _has_missing(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_missing, value.values()))
    return any(map(_has_missing, value)) if isinstance(value, list) else value == MISSING


def missing_keys(config: DictConfig, prefix: str = "") -> list[str]:
    """Dotted names of keys without a value.

    OmegaConf's own function is not used, because it resolves interpolations, which may fail.
    """
    names = [f"{prefix}{key!s}" for key in config if OmegaConf.is_missing(config, key)]
    for key, child in children(config):
        if isinstance(child, DictConfig):
            names += missing_keys(child, f"{prefix}{key}.")
    return sorted(names)


def unknown_keys(config: DictConfig, prefix: str = "") -> list[str]:
    """Dotted names of keys that a schema doesn't have (Hydra's `+` lets them through)."""
    names: list[str] = []
    schema = OmegaConf.get_type(config)
    schema_keys = {field.name for field in fields(schema)} if is_dataclass(schema) else None
    if config.get("_target_") != getattr(schema, "_target_", config.get("_target_")):
        schema_keys = None  # a user's class may take any key
    for key, child in children(config):
        if schema_keys is not None and key not in schema_keys:
            names.append(f"{prefix}{key}")
        elif isinstance(child, DictConfig):
            names += unknown_keys(child, f"{prefix}{key}.")
    return names


def flat(config: DictConfig, prefix: str = "") -> list[str]:
    """All dotted names: tables, and the keys in them."""
    names: list[str] = []
    for key, child in children(config):
        names.append(f"{prefix}{key}")
        if isinstance(child, DictConfig):
            names += flat(child, f"{prefix}{key}.")
    return names


def children(config: DictConfig) -> list[tuple[str, Any]]:
    """Keys and values, with interpolations unresolved. A missing or null value is None."""
    pairs: list[tuple[str, Any]] = []
    for key in config:  # keys are text; a user's table may also have numbers
        node = config._get_node(key)
        empty = node is None or node._is_none() or node._is_missing() or node._is_interpolation()
        pairs.append((str(key), None if empty else node))
    return pairs
