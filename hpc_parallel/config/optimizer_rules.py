"""Chooses the optimizer class and settings of a weight by its name and the rules of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from hpc_parallel.config.schema import AdamWConfig, OptimizerConfig

ELEMENTWISE = ("torch.optim.AdamW", "torch.optim.Adam", "torch.optim.SGD")
"""Classes that update each number by its own gradient and state: their state can be kept in bfloat16."""


@dataclass(frozen=True)
class Settings:
    """How a weight is updated."""

    target: str  # the path of the class
    weight_decay: float
    learning_rate_scale: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)  # other arguments of the class


def settings_for(name: str, dims: int, config: OptimizerConfig) -> Settings:
    """The settings of the weight `name`, which has `dims` dims; later rules take precedence."""
    defaults = {"betas": tuple(config.betas), "eps": config.eps} if isinstance(config, AdamWConfig) else {}
    decay = config.weight_decay if dims > 1 else 0.0
    settings = Settings(config._target_, decay, options={**defaults, **config.options})
    for rule in config.groups.values():
        if applies(rule.get("match"), name) and dims in (rule.get("dims") or [dims]):
            settings = _apply(settings, rule)
    return settings


def _apply(settings: Settings, rule: Mapping[str, Any]) -> Settings:
    if "_target_" in rule:  # the earlier options belong to another class
        settings = replace(settings, target=rule["_target_"], options={})
    changed = {key: rule[key] for key in ("weight_decay", "learning_rate_scale") if key in rule}
    return replace(settings, options={**settings.options, **rule.get("options", {})}, **changed)


def applies(patterns: list[str] | None, name: str) -> bool:
    """Whether a rule with these patterns is for the weight `name`."""
    return patterns is None or any(fnmatchcase(name, pattern) for pattern in patterns)
