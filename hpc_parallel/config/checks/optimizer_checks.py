"""Check the optimizer: its class, its rules for some weights, and the schedule of its learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hpc_parallel.config.class_paths import target_problems
from hpc_parallel.config.key_suggestions import suggest
from hpc_parallel.config.learning_rate import SCHEDULES, warmup_of
from hpc_parallel.config.schema import OptimizerConfig, RunConfig
from hpc_parallel.problems import Problem, Problems, nearest

CLASSES = {  # files of conf/optimizer -> the class that their options belong to
    "adamw": "torch.optim.AdamW",
    "sgd": "torch.optim.SGD",
    "adafactor": "torch.optim.Adafactor",
    "muon": "torch.optim.Muon",
}


def find_problems(config: RunConfig) -> Problems:
    optimizer = config.optimizer
    expected = CLASSES.get(optimizer.name, optimizer._target_)
    if optimizer._target_ != expected:
        rule = f"can't be combined with optimizer={optimizer.name}, which sets the arguments of {expected}"
        hint = f"Try optimizer=custom optimizer._target_={optimizer._target_}."
        yield f"optimizer._target_ = {optimizer._target_} {rule}. {hint}"
    elif optimizer.name not in CLASSES:
        yield from target_problems("optimizer._target_", optimizer._target_)
    for name, rule_of_group in optimizer.groups.items():
        yield from _group(f"optimizer.groups.{name}", rule_of_group)
    yield from _schedule(optimizer)
    steps, warmup_steps = max(1, config.training.steps), optimizer.warmup_steps
    if warmup_steps is not None and not 0 <= warmup_steps <= steps:
        rule = f"must lie between 0 and {steps:g}"
        yield Problem("optimizer.warmup_steps", warmup_steps, rule, (warmup_of(steps),))


def _schedule(optimizer: OptimizerConfig) -> Problems:
    schedule = optimizer.schedule
    if schedule in SCHEDULES:
        return
    if "." not in schedule:
        close = nearest(schedule, SCHEDULES) or [*SCHEDULES][:1]
        rule = f"is not one of {', '.join(SCHEDULES)}, nor the path of a function"
        yield Problem("optimizer.schedule", schedule, rule, tuple(close))
        return
    yield from target_problems("optimizer.schedule", schedule, kind="function")
    if optimizer.warmup_steps is not None:
        rule = f"has no effect: {schedule} decides every step"
        yield Problem("optimizer.warmup_steps", optimizer.warmup_steps, rule, (None,))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _is_list(of: type, value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is of for item in value)


GROUP_KEYS: dict[str, tuple[Callable[[Any], bool], str, Any]] = {
    # key of a rule: (whether a value is legal, what it must be, a legal value)
    "match": (lambda value: _is_list(str, value), "must be a list of patterns", ["blocks.*.bias"]),
    "dims": (lambda value: _is_list(int, value), "must be a list of whole numbers", [1]),
    "learning_rate_scale": (_is_number, "must be a number of at least 0", 0.5),
    "weight_decay": (_is_number, "must be a number of at least 0", 0.0),
    "_target_": (lambda value: isinstance(value, str), "must be the path of a class", "torch.optim.AdamW"),
    "options": (lambda value: isinstance(value, dict), "must be a table", {"eps": 1e-8}),
}


def _group(key: str, rule_of_group: Any) -> Problems:
    if not isinstance(rule_of_group, dict):
        yield Problem(key, rule_of_group, "must be a table", ({"match": ["*"], "weight_decay": 0},))
        return
    for name, value in rule_of_group.items():
        if name not in GROUP_KEYS:
            near = suggest(f"{key}.{name}", [f"{key}.{other}" for other in GROUP_KEYS])
            hint = near.partition("=")[0] if near else f"one of {', '.join(GROUP_KEYS)}"
            yield f"{key}.{name}: a rule has no such key. Try {hint}."
            continue
        is_legal, rule, legal = GROUP_KEYS[name]
        if not is_legal(value):
            yield Problem(f"{key}.{name}", value, rule, (legal,))
        elif name == "_target_":
            yield from target_problems(f"{key}._target_", value)
