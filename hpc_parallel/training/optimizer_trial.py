"""Tries a class of optimizer on two small weights before it gets those of the model.

Every layout relies on three properties that can't be read from a class: it updates a weight only by this
weight's gradient and state, it draws no random numbers, and tensors and plain numbers hold its state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from hpc_parallel.problems import ConfigError

SIZES = (1.0, 1e3, 1e-3)
"""Of the gradients in each step: a class may clip them only above some norm."""
NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}
"""The plain numbers that a checkpoint holds, and their types in it."""


@dataclass(frozen=True)
class OptimizerTrial:
    """Weights after some steps by fixed gradients, and their optimizer.

    settings: of the optimizer's group when it was built.
    """

    weights: Sequence[Tensor]
    optimizer: Optimizer
    settings: Mapping[str, Any]

    @property
    def group(self) -> Mapping[str, Any]:
        (group,) = self.optimizer.param_groups
        return group

    @property
    def numbers(self) -> dict[str, Any]:
        """The numbers among the settings, now."""
        return {key: value for key, value in self.group.items() if type(value) in NUMBERS}


def require_usable(
    kind: type[Optimizer], options: Mapping[str, Any], *, device: torch.device, ranks: int, split: bool
) -> None:
    """Raises ConfigError if a checkpoint can't hold the state, or if the layout would change the result.

    `split`: the `ranks` hold different weights. Raises what `kind` raises if it can't be used at all.
    """
    name = f"{kind.__module__}.{kind.__qualname__}"
    if callable(getattr(kind, "train", None)) and callable(getattr(kind, "eval", None)):
        rule = "has other weights after its eval(), which nothing calls before a validation here"
        raise ConfigError([f"optimizer: {name} {rule}. Try optimizer=adamw."])
    together, repeated, first, second = (
        _train(kind, options, device=device, indices=indices) for indices in ((0, 1), (0, 1), (0,), (1,))
    )
    problems = _state_problems(together, options)
    if not _same(together.weights, repeated.weights):
        if ranks > 1:
            problems.append("gives other weights in a second trial, so the devices would differ")
    elif not problems and not _goes_on(kind, options, device=device, weights=together.weights):
        problems.append("gives other weights after a restart: it keeps something that checkpoints don't hold")
    elif split and not (
        _same(together.weights, (*first.weights, *second.weights), rtol=1e-9)
        and together.numbers == first.numbers == second.numbers
    ):
        problems.append("updates a weight by the gradients of others, which are on other devices")
    if problems:
        raise ConfigError([f"optimizer: {name} {problem}. Try optimizer=adamw." for problem in problems])


def _train(
    kind: type[Optimizer],
    options: Mapping[str, Any],
    *,
    device: torch.device,
    indices: Sequence[int],
    restarts: bool = False,
) -> OptimizerTrial:
    """Train the weights of these `indices`; with `restarts`, each step has a new optimizer with the state."""
    weights = [
        Parameter(torch.linspace(-1, 2 + index, 12, dtype=torch.float64, device=device).view(3, 4))
        for index in indices
    ]
    optimizer = kind(weights, **options)
    if len(optimizer.param_groups) != 1:
        raise ValueError("it makes several groups of one")
    settings = dict(optimizer.param_groups[0])
    for step in range(len(SIZES)):
        if restarts and step:
            optimizer = _with_state(kind(weights, **options), optimizer, settings)
        for index, weight in zip(indices, weights, strict=True):
            weight.grad = SIZES[step] * torch.cos((1 + step) * (index + weight.detach()))
        optimizer.step()
    return OptimizerTrial([weight.detach() for weight in weights], optimizer, settings)


def _goes_on(
    kind: type[Optimizer], options: Mapping[str, Any], *, device: torch.device, weights: Sequence[Tensor]
) -> bool:
    """Whether a class updates by what checkpoints hold, and by nothing else that it keeps."""
    try:
        restarted = _train(kind, options, device=device, indices=(0, 1), restarts=True)
    except Exception:  # of any kind: it is the user's code
        return False
    return _same(weights, restarted.weights)


def _with_state(new: Optimizer, old: Optimizer, built: Mapping[str, Any]) -> Optimizer:
    """`new` with what a checkpoint holds of `old`."""
    for weight, state in old.state.items():  # of weights only: `_state_problems` has found no other entry
        new.state[weight] = {
            key: value for key, value in state.items() if isinstance(value, Tensor) or type(value) in NUMBERS
        }
    group = old.param_groups[0]
    new.param_groups[0] |= {key: group[key] for key in changed_settings(group, built)}
    return new


def _state_problems(trial: OptimizerTrial, options: Mapping[str, Any]) -> list[str]:
    optimizer, group = trial.optimizer, trial.group
    states = [state for weight, state in optimizer.state.items() if isinstance(weight, Tensor)]
    plain = [
        str(key)
        for key, value in {key: value for state in states for key, value in state.items()}.items()
        if not (isinstance(value, Tensor) or value is None or type(value) in NUMBERS)
    ]
    if len(states) < len(optimizer.state):
        plain.append("entries of no weight")
    problems = [f"keeps {', '.join(plain)} outside of tensors, which checkpoints can't hold"] if plain else []
    changed = changed_settings(group, trial.settings)
    if others := [key for key in changed if type(group[key]) not in NUMBERS]:
        problems.append(f"keeps {', '.join(others)} in its groups, which checkpoints don't hold")
    if given := [key for key in changed if key in options]:
        problems.append(f"changes its setting {', '.join(given)}, so a resume could not change it")
    return problems


def changed_settings(group: Mapping[str, Any], built: Mapping[str, Any]) -> list[str]:
    """The keys of a group that its optimizer has set since it was `built`, but for the learning rate."""
    return [
        key
        for key, value in group.items()
        if key not in ("params", "lr") and built.get(key, ...) is not value
    ]


def _same(weights: Sequence[Tensor], others: Sequence[Tensor], *, rtol: float = 0.0) -> bool:
    return all(torch.allclose(a, b, rtol=rtol, atol=0) for a, b in zip(weights, others, strict=True))
