"""Replace each `auto` in a composed configuration and give it types, or find missing and unknown keys."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, fields, is_dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, TypeGuard, cast

from omegaconf import BooleanNode, DictConfig, OmegaConf, errors
from omegaconf.errors import OmegaConfBaseException, ValidationError

from hpc_parallel.config.key_suggestions import suggest
from hpc_parallel.config.node_devices import (
    AUTO,
    choose_launcher,
    default_precision,
    default_share,
    devices_of_a_node,
    gpus_of_allocation,
)
from hpc_parallel.config.schema import RunConfig, StrategyConfig
from hpc_parallel.config.script import KINDS, NODE, RANKS, TASK, TORCHRUN, name_of
from hpc_parallel.config.site_schema import HERE
from hpc_parallel.config.task_schema import JOB_SECONDS, LOCAL_SECONDS
from hpc_parallel.config.typed_config import MistypedError, typed
from hpc_parallel.layout.batch_plan import default_batch_size, usual_batch_size
from hpc_parallel.layout.layout import DATAPARALLEL, SPMD
from hpc_parallel.layout.schedules import schedule_named
from hpc_parallel.problems import ConfigError, Problem
from hpc_parallel.slurm.allocation import ALLOCATION
from hpc_parallel.slurm.limits import NodeShare

# Keys without a default, with an example.
REQUIRED = {
    "cluster.name": "mysite", "data.path": "tokens.npy", "data.dataset._target_": "mydata.MyDataset",
    "optimizer._target_": "torch.optim.SGD",
}  # fmt: skip

RESTARTS = 3  # of a job whose run can go on from where it was


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
    try:
        launcher_reason = _set_launcher(config)  # first: the other defaults depend on it
        for set_default in (_set_devices, _set_gpu_defaults, _set_script, _set_batch, _set_time_budget):
            set_default(config)
        _set_restarts(config)
        values = cast(dict[str, Any], OmegaConf.to_container(config, resolve=True, throw_on_missing=True))
        if values["data"] and values["data"].get("validation") == {}:
            values["data"]["validation"] = None  # its default is an empty table, to which keys can be added
        run = typed(values)
    except OmegaConfBaseException as error:
        refused = f"{error.full_key}: {str(error).splitlines()[0].rstrip('.')}."
        if isinstance(error, errors.InterpolationKeyError | errors.UnsupportedInterpolationType):
            refused += r" ${...} stands for another key. Try \${...} for a variable of the shell."
        raise UnresolvedError(_problems_of_keys(config) or [refused]) from error
    except MistypedError as error:
        raise UnresolvedError(_problems_of_keys(config) or error.problems) from error
    tables = (config[group] for group in ("model", "data") if OmegaConf.is_dict(config[group]))
    if any(map(unknown_keys, tables)):  # `typed` takes any table there
        raise UnresolvedError(_problems_of_keys(config))
    return Resolved(run, asdict(run), launcher_reason)


def _problems_of_keys(config: DictConfig) -> list[Problem | str]:
    problems: list[Problem | str] = [
        f"{key} has no value and no default. Try {key}={REQUIRED.get(key, 'VALUE')}."
        for key in missing_keys(config)
    ]
    for key in unknown_keys(config):
        close = suggest(key, flat(config))
        problems.append(f"+{key}: there is no key {key}." + (f" Did you mean {close}?" if close else ""))
    return problems


def _set_launcher(config: DictConfig) -> str:
    """Set the launcher that `launcher.kind=auto` means here; returns the reason.

    An allocation without GPUs trains on its CPUs, whatever the cluster has.
    """
    kind, reason = choose_launcher(config.launcher.kind)
    if reason:
        config.launcher.kind = kind
    if kind == ALLOCATION and gpus_of_allocation(config.cluster) == 0:
        config.cluster.gpus = False
    return reason


def _set_devices(config: DictConfig) -> None:
    """Set a number for `gpus_per_node=auto`. Raises UnresolvedError."""
    try:
        given = config.gpus_per_node
    except OmegaConfBaseException:  # a reference to nothing, which `resolve` reports
        return
    if given != AUTO:
        with suppress(ValueError):  # of a text that is no number, which `typed` reports
            config.gpus_per_node = int(given)
        return
    # Only these two keys: another key may refer to `gpus_per_node`.
    launcher = {key: config.launcher[key] for key in ("kind", "partition")}
    cluster = OmegaConf.to_container(config.cluster, resolve=True)
    try:
        devices = devices_of_a_node({"device": config.device, "launcher": launcher, "cluster": cluster})
    except ConfigError as error:
        raise UnresolvedError(error.problems) from error
    config.gpus_per_node = devices


def _set_gpu_defaults(config: DictConfig) -> None:
    """Set a precision, and each device's share of a node's cores and memory."""
    values = {
        "device": config.device,
        "launcher": {key: config.launcher[key] for key in ("kind", "partition")},
        "cluster": {key: config.cluster[key] for key in ("gpus", "gpu_type")},
        "flags": [*config.cluster.extra, *config.launcher.extra],
    }
    share = default_share(values) if config.cluster.cpus_per_device is None else NodeShare()
    config.training.precision = config.training.precision or default_precision(values)
    compiles = config.training.compile
    with suppress(ValidationError):  # neither true nor false, which `typed` reports
        config.training.compile = config.training.speed == "max" if compiles == AUTO else as_switch(compiles)
    for key, value in {"cpus_per_device": share.cpus, "memory_gb_per_device": share.memory_gb}.items():
        if config.cluster[key] is None:
            config.cluster[key] = value


def as_switch(value: Any) -> bool:
    """True or false for all that OmegaConf reads as such. Raises ValidationError."""
    return bool(OmegaConf.create({"switch": BooleanNode(value)}).switch)


def _set_script(config: DictConfig) -> None:
    """For `task=script`, set a name after the script, and the processes to start in place of a strategy."""
    if config.task.name != TASK:
        return
    if OmegaConf.is_interpolation(config, "name"):
        config.name = name_of({key: config.script[key] for key in KINDS})
    start = config.script.start
    execution = DATAPARALLEL if start == NODE else SPMD  # NODE: one process drives all devices of a node
    config.strategy = OmegaConf.structured(StrategyConfig(name=TASK, replicate=-1, execution=execution))
    if start != RANKS and config.cluster.start != "mpirun":
        config.cluster.start = TORCHRUN if start == TORCHRUN else "srun"
    config.training.global_batch_size = max(1, config.nodes * config.gpus_per_node)


def _set_batch(config: DictConfig) -> None:
    """Set a number for `training.global_batch_size`, and the microbatches of a user's schedule."""
    strategy, training = config.strategy, config.training
    file = schedule_named(str(strategy.schedule)).file
    undecided = strategy.microbatches is training.microbatch_size is None
    if file is not None and strategy.pipeline != 1 and undecided:
        strategy.microbatches = file.microbatches
    if config.training.global_batch_size is not None:
        return
    try:
        values = {key: config[key] for key in ("model", "training", "nodes", "gpus_per_node")}
        size = default_batch_size({**values, "strategy": OmegaConf.to_container(strategy, resolve=True)})
    except KeyError:  # no such schedule, which a check reports, or a deleted key
        size = usual_batch_size(config.model)
    config.training.global_batch_size = size


def _set_time_budget(config: DictConfig) -> None:
    """Set a number for `task.seconds`, if the task has this key."""
    if config.task.get("seconds", 0) is None:
        is_here = config.launcher.kind in HERE
        seconds = LOCAL_SECONDS if is_here else min(JOB_SECONDS, 30.0 * config.launcher.time_minutes)
        config.task.seconds = seconds


def _set_restarts(config: DictConfig) -> None:
    if config.launcher.max_restarts is not None:
        return
    saves = config.task.name == "train" and config.training.checkpoint_every is not None
    resumes = saves or (config.task.name == TASK and bool(config.script.resume_arguments))
    config.launcher.max_restarts = RESTARTS if resumes and config.launcher.kind not in HERE else 0


def with_values(config: DictConfig, values: Mapping[str, Any]) -> DictConfig:
    """A copy of the configuration with these values, by dotted key."""
    config = copy.deepcopy(config)
    for key, value in values.items():
        OmegaConf.update(config, key, value)
    return config


def missing_keys(config: DictConfig) -> list[str]:
    """Dotted names of keys without a value.

    OmegaConf's own function is not used, because it resolves interpolations, which may fail.
    """
    return sorted(key for key, node in _nodes(config) if node is not None and node._is_missing())


def unknown_keys(config: DictConfig, prefix: str = "") -> list[str]:
    """Dotted names of keys that a schema doesn't have (Hydra's `+` lets them through)."""
    names: list[str] = []
    schema = OmegaConf.get_type(config)
    schema_keys = {field.name for field in fields(schema)} if is_dataclass(schema) else None
    if config.get("_target_") != getattr(schema, "_target_", config.get("_target_")):
        schema_keys = None  # a user's class may take any key
    for key in config:
        if schema_keys is not None and key not in schema_keys:
            names.append(f"{prefix}{key!s}")
        elif _is_table(node := config._get_node(key)):
            names += unknown_keys(node, f"{prefix}{key!s}.")
    return names


def flat(config: DictConfig) -> list[str]:
    """All dotted names: tables, and the keys in them."""
    return [key for key, _ in _nodes(config)]


def _nodes(config: DictConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and nodes, with interpolations unresolved: tables, and the keys in them."""
    for key in config:  # keys are text; a user's table may also have numbers
        node: Any = config._get_node(key)
        yield f"{prefix}{key!s}", node
        if _is_table(node):
            yield from _nodes(node, f"{prefix}{key!s}.")


def _is_table(node: Any) -> TypeGuard[DictConfig]:
    special = node is None or node._is_none() or node._is_missing() or node._is_interpolation()
    return not special and isinstance(node, DictConfig)
