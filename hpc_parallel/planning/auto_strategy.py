"""Replace `strategy=auto` by the layout with the shortest planned step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hpc_parallel.config.checks import layout_checks
from hpc_parallel.config.checks.all_checks import find_problems
from hpc_parallel.config.checks.suggestions import multiples_near
from hpc_parallel.config.node_devices import (
    AUTO,
    OF_CPUS,
    choose_launcher,
    default_precision,
    gpus_of_allocation,
)
from hpc_parallel.config.resolve import resolve, with_values
from hpc_parallel.config.schema import RunConfig, StrategyConfig
from hpc_parallel.layout.layout import Layout
from hpc_parallel.planning.collective_times import on_nodes_of
from hpc_parallel.planning.hardware import CPU, Hardware, named_hardware
from hpc_parallel.planning.layouts import AXES, FREE, Choices, layouts
from hpc_parallel.planning.ranking import advantage, seconds, without_room
from hpc_parallel.planning.search import Candidate, search
from hpc_parallel.planning.work import unplanned, unsearched
from hpc_parallel.problems import ConfigError, Problem, raise_if_any
from hpc_parallel.record.recorded_start import key_of
from hpc_parallel.slurm.allocation import ALLOCATION

MANY = 2**20  # a limit for the processes of a node, for CPU runs that name no hardware
# The values of conf/strategy/auto.yaml.
OPEN = {"name": AUTO, "replicate": FREE, "pipeline": 1, "shard": 1, "context": 1, "tensor": 1}


@dataclass(frozen=True)
class Question:
    """The input of a search. config: the configuration of the run; its layout does not matter."""

    config: RunConfig
    hardware: Hardware
    choices: Choices


@dataclass(frozen=True)
class Choice:
    """The configuration and the overrides with a layout in the place of `auto`, and a line for the user."""

    composed: DictConfig
    overrides: list[str]
    note: str


def is_auto(composed: DictConfig) -> bool:
    return bool(OmegaConf.select(composed, "strategy.name", default=None) == AUTO)


def choose(composed: DictConfig, overrides: Sequence[str], *, user_folder: Path | None) -> Choice:
    """Put the fastest layout that fits in the place of `auto`. Raises ConfigError with all problems."""
    question = ask(composed, overrides, user_folder=user_folder)
    result = search(question.config, question.hardware, choices=question.choices, most=2)
    if not result.best:
        raise ConfigError(without_room(result, question.config, question.hardware, choices=question.choices))
    first = result.best[0]
    chosen, name = first.overrides, _named(composed)
    reason = f" {advantage(result.best[:2])}" if len(result.best) > 1 else ""
    note = f"auto        {' '.join(chosen)}: {seconds(first.step.total_s)} a step is predicted.{reason}"
    kept = [word for word in overrides if key_of(word) not in {"strategy", *map(key_of, (*chosen, *name))}]
    return Choice(_with_candidate(composed, first), [*kept, *chosen, *name], note)


def ask(composed: DictConfig, overrides: Sequence[str], *, user_folder: Path | None) -> Question:
    """The choices that a configuration with `strategy=auto` leaves to the search. Raises ConfigError."""
    values = composed.strategy
    choices = _choices(values, composed.training, {key_of(word) for word in overrides})
    opened = with_values(composed, {f"strategy.{key}": value for key, value in OPEN.items()})
    hardware = hardware_of_run(opened, user_folder=user_folder)
    if opened.device == AUTO:
        opened.device = hardware.device.kind
    config = resolve(opened).config
    ignored = list(layout_checks.find_problems(config))
    problems = [problem for problem in find_problems(config, overrides) if problem not in ignored]
    problems += unplanned(config, Layout(replicate=config.devices), hardware)
    problems += unsearched(config)
    raise_if_any(problems)
    question = Question(config, on_nodes_of(config, hardware), choices)
    if problem := _without_layout(question):
        raise ConfigError([problem])
    return question


def hardware_of_run(composed: DictConfig, *, user_folder: Path | None) -> Hardware:
    """The hardware of `plan.hardware`. Without this key, a run on CPUs gets a server of unknown memory.

    Raises ConfigError.
    """
    name = composed.plan.hardware
    if name is None and _on_cpus(composed):
        hardware = named_hardware(CPU, user_folder=user_folder)
        node = replace(hardware.node, devices=MANY)
        return replace(hardware, device=replace(hardware.device, memory_bytes=math.inf), node=node)
    return named_hardware(name, user_folder=user_folder, needed_by="strategy=auto")


def _on_cpus(composed: DictConfig) -> bool:
    kind = choose_launcher(composed.launcher.kind)[0]
    without = kind == ALLOCATION and gpus_of_allocation(composed.cluster) == 0
    values: Mapping[str, Any] = {
        "device": composed.device,
        "launcher": {"kind": kind},
        "cluster": {"gpus": composed.cluster.gpus and not without},
    }
    return default_precision(values) == OF_CPUS


def _choices(strategy: DictConfig, training: DictConfig, typed: set[str]) -> Choices:
    """The search keeps a degree, schedule or mode that is not the default, or that an override sets."""
    degrees = {
        axis: strategy[axis] if f"strategy.{axis}" in typed or strategy[axis] != OPEN[axis] else FREE
        for axis in AXES
    }
    schedule, mode = strategy.schedule, training.activation_checkpointing
    choices = Choices(degrees)
    if "strategy.schedule" in typed or schedule != StrategyConfig.schedule:
        choices = replace(choices, schedules=(schedule,))
    if "training.activation_checkpointing" in typed or mode != "none":
        choices = replace(choices, checkpointing=(mode,))
    return choices


def _without_layout(asked: Question) -> Problem | str | None:
    """The reason why no layout is legal; None if a layout is legal."""
    if any(layouts(asked.config, asked.choices)):
        return None
    config, degrees = asked.config, asked.choices.degrees
    fixed = [f"strategy.{axis}={degree}" for axis, degree in degrees.items() if degree != FREE]
    if fixed and any(layouts(config, replace(asked.choices, degrees=dict.fromkeys(AXES, FREE)))):
        return f"{' '.join(fixed)}: no legal layout of {config.devices} devices has this. Try without it."
    batch = config.training.global_batch_size
    rule = f"does not split over any layout of {config.devices} devices"
    return Problem("training.global_batch_size", batch, rule, multiples_near(batch, config.devices))


def _named(composed: DictConfig) -> list[str]:
    """A run that has no name of its own is called `auto`, so that `resume=auto` finds it."""
    return [f"name={AUTO}"] if OmegaConf.is_interpolation(composed, "name") else []


def _with_candidate(composed: DictConfig, candidate: Candidate) -> DictConfig:
    chosen, config = with_values(composed, {}), candidate.config
    for key in ("name", "schedule", *AXES):
        chosen.strategy[key] = getattr(config.strategy, key)
    for key in ("global_batch_size", "microbatch_size", "activation_checkpointing"):
        chosen.training[key] = getattr(config.training, key)
    if _named(composed):
        chosen.name = AUTO
    return chosen
