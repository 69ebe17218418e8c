"""Which class with which settings updates each weight, by the rules of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch.distributed as dist
from torch.nn import Parameter

from hpc_parallel.config.schema import AdamWConfig, OptimizerConfig
from hpc_parallel.problems import ConfigError, Problem
from hpc_parallel.strategies import exchange


@dataclass(frozen=True)
class Settings:
    """How a weight is updated."""

    target: str  # the path of the class
    weight_decay: float
    learning_rate_scale: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)  # other arguments of the class


def settings_of(parameters: Mapping[str, Parameter], config: OptimizerConfig) -> dict[str, Settings]:
    """Returns the settings of each weight of `parameters`, which are this rank's by full name.

    All ranks must call it together. Raises ConfigError for a pattern that matches no weight on any rank.
    """
    _require_matches(list(parameters), config.groups)
    return {name: _settings(name, parameter.ndim, config) for name, parameter in parameters.items()}


def _settings(name: str, dims: int, config: OptimizerConfig) -> Settings:
    defaults = {"betas": tuple(config.betas), "eps": config.eps} if isinstance(config, AdamWConfig) else {}
    decay = config.weight_decay if dims > 1 else 0.0
    settings = Settings(config._target_, decay, options={**defaults, **config.options})
    for rule in config.groups.values():
        if _matches(name, rule.get("match")) and dims in (rule.get("dims") or [dims]):
            settings = _apply(settings, rule)
    return settings


def _apply(settings: Settings, rule: Mapping[str, Any]) -> Settings:
    if "_target_" in rule:  # the options are of another class
        settings = replace(settings, target=rule["_target_"], options={})
    changed = {key: rule[key] for key in ("weight_decay", "learning_rate_scale") if key in rule}
    return replace(settings, options={**settings.options, **rule.get("options", {})}, **changed)


def _matches(name: str, patterns: list[str] | None) -> bool:
    return patterns is None or any(fnmatchcase(name, pattern) for pattern in patterns)


def _require_matches(names: list[str], rules: Mapping[str, Mapping[str, Any]]) -> None:
    matched = [key for key, rule in rules.items() if any(_matches(name, rule.get("match")) for name in names)]
    by_rank = exchange.all_gather(matched) if rules and dist.is_initialized() else [matched]
    if unmatched := rules.keys() - {key for matched_keys in by_rank for key in matched_keys}:
        rule = f"matches no weight of the model, whose first is {names[0]}"
        raise ConfigError(
            [
                Problem(f"optimizer.groups.{key}.match", rules[key]["match"], rule, (["*.weight"],))
                for key in sorted(unmatched)
            ]
        )
