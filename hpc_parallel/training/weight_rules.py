"""Which class with which settings updates each weight, by the rules of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.nn import Parameter

from hpc_parallel.config.optimizer_rules import Settings, applies, settings_for
from hpc_parallel.config.schema import OptimizerConfig
from hpc_parallel.problems import ConfigError, Problem
from hpc_parallel.strategies import exchange


def settings_of(parameters: Mapping[str, Parameter], config: OptimizerConfig) -> dict[str, Settings]:
    """Returns the settings of each weight of `parameters`.

    `parameters`: this rank's weights by full name. All ranks must call it together. Raises ConfigError for a
    pattern that matches no weight on any rank.
    """
    require_matches(list(parameters), config.groups)
    return {name: settings_for(name, parameter.ndim, config) for name, parameter in parameters.items()}


def require_matches(names: list[str], rules: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises ConfigError for a rule that matches none of the `names` of any rank."""
    matched = [key for key, rule in rules.items() if any(applies(rule.get("match"), name) for name in names)]
    by_rank = exchange.all_gather(matched) if rules and dist.is_initialized() else [matched]
    if unmatched := rules.keys() - {key for matched_keys in by_rank for key in matched_keys}:
        rule = f"matches no weight of the model, whose first is {names[0]}"
        raise ConfigError(
            [
                Problem(f"optimizer.groups.{key}.match", rules[key]["match"], rule, (["*.weight"],))
                for key in sorted(unmatched)
            ]
        )
