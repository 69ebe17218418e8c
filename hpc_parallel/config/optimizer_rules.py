"""The optimizer by its configuration: each weight's class and settings, and each step's learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from numbers import Real
from typing import Any

from hydra.utils import get_method

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
            if "_target_" in rule:  # the earlier options belong to another class
                settings = replace(settings, target=rule["_target_"], options={})
            changed = {key: rule[key] for key in ("weight_decay", "learning_rate_scale") if key in rule}
            options = {**settings.options, **rule.get("options", {})}
            settings = replace(settings, options=options, **changed)
    return settings


def applies(patterns: list[str] | None, name: str) -> bool:
    """Whether a rule with these patterns is for the weight `name`."""
    return patterns is None or any(fnmatchcase(name, pattern) for pattern in patterns)


def learning_rate(step: int, *, steps: int, config: OptimizerConfig) -> float:
    """Returns the rate of the 1-based `step`: a linear warm-up, then the schedule `config.schedule`.

    A user's function sets the rate of all steps, so no warm-up is added. It is called with (step, steps) and
    returns a factor of `config.learning_rate`. Raises ValueError if this factor is not a finite number of at
    least 0.
    """
    if config.schedule not in SCHEDULES:
        return config.learning_rate * _users_factor(step, steps=steps, path=config.schedule)
    warmup = warmup_of(steps) if config.warmup_steps is None else config.warmup_steps
    if step <= warmup:
        return config.learning_rate * step / warmup
    decayed = SCHEDULES[config.schedule](step, warmup, steps, config.decay_share)
    return config.learning_rate * (1 - (1 - config.final_share) * decayed)


def warmup_of(steps: int) -> int:
    """The steps of warm-up in a training of `steps`, if no number of them is chosen."""
    return steps // 20


def _linear(step: int, warmup: int, steps: int, _: float) -> float:
    return (step - warmup) / max(1, steps - warmup)


def _warmup_stable_decay(step: int, warmup: int, steps: int, decay_share: float) -> float:
    """Constant, then linear in the last `decay_share` of the steps (Hu et al. 2024, MiniCPM)."""
    start = max(warmup, steps - round(decay_share * steps))
    return max(0.0, _linear(step, start, steps, decay_share))


SCHEDULES: dict[str, Callable[[int, int, int, float], float]] = {
    # (step, warmup, steps, decay_share) -> how much of the decay is done, from 0 to 1
    "cosine": lambda *place: (1 - math.cos(math.pi * _linear(*place))) / 2,
    "linear": _linear,
    "constant": lambda *_: 0.0,
    "wsd": _warmup_stable_decay,
}


def _users_factor(step: int, *, steps: int, path: str) -> float:
    factor, again = (get_method(path)(step, steps) for _ in range(2))
    if not isinstance(factor, Real) or not 0 <= float(factor) < math.inf:
        raise ValueError(
            f"optimizer.schedule={path} returned {factor!r} at step {step} of {steps}, not a finite number "
            "of at least 0."
        )
    if again != factor:  # other ranks, and a run that continues, would have other rates
        raise ValueError(
            f"optimizer.schedule={path} returned {factor!r} and then {again!r} for step {step} of {steps}: "
            "it must depend on the step and the number of steps alone."
        )
    return float(factor)
