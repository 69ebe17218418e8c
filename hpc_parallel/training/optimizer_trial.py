"""Tries a class of optimizer on two small weights before it gets those of the model.

Every layout relies on three properties that can't be read from a class: it updates a weight only by this
weight's gradient and state, it draws no random numbers, and its state is in tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from hpc_parallel.problems import ConfigError

STEPS = 3


def require_usable(
    kind: type[Optimizer], options: Mapping[str, Any], *, device: torch.device, ranks: int, split: bool
) -> None:
    """Raises ConfigError if a checkpoint can't hold the state, or if the layout would change the result.

    `split`: the `ranks` hold different weights. Raises what `kind` raises if it can't be used at all.
    """
    together, optimizer = _train(kind, options, device=device, indices=(0, 1))
    problems = _state_problems(optimizer)
    repeated, _ = _train(kind, options, device=device, indices=(0, 1))
    alone = [_train(kind, options, device=device, indices=(index,))[0][0] for index in (0, 1)]
    if not _same(together, repeated):
        if ranks > 1:
            problems.append("gives other weights in a second trial, so the devices would differ")
    elif split and not _same(together, alone, rtol=1e-9):
        problems.append("updates a weight by the gradients of others, which are on other devices")
    if problems:
        name = f"{kind.__module__}.{kind.__qualname__}"
        raise ConfigError([f"optimizer: {name} {problem}. Try optimizer=adamw." for problem in problems])


def _train(
    kind: type[Optimizer], options: Mapping[str, Any], *, device: torch.device, indices: Sequence[int]
) -> tuple[list[Tensor], Optimizer]:
    """Returns the weights of these `indices` after some steps by fixed gradients, and their optimizer."""
    weights = [
        Parameter(torch.linspace(-1, 2 + index, 12, dtype=torch.float64, device=device).view(3, 4))
        for index in indices
    ]
    optimizer = kind(weights, **options)
    for step in range(STEPS):
        for index, weight in zip(indices, weights, strict=True):
            weight.grad = torch.cos((1 + step) * (index + weight.detach()))
        optimizer.step()
    return [weight.detach() for weight in weights], optimizer


def _state_problems(optimizer: Optimizer) -> list[str]:
    values = {key: value for state in optimizer.state.values() for key, value in state.items()}
    plain = [str(key) for key, value in values.items() if not isinstance(value, Tensor) and value is not None]
    if any(not isinstance(key, Tensor) for key in optimizer.state):
        plain.append("entries of no weight")
    problems = [f"keeps {', '.join(plain)} outside of tensors, which checkpoints can't hold"] if plain else []
    (group,) = optimizer.param_groups
    before = optimizer.defaults
    changed = [key for key, value in group.items() if key != "params" and before.get(key, ...) is not value]
    if changed:
        problems.append(f"keeps {', '.join(changed)} in its groups, which checkpoints don't hold")
    return problems


def _same(weights: Sequence[Tensor], others: Sequence[Tensor], *, rtol: float = 0.0) -> bool:
    return all(torch.allclose(a, b, rtol=rtol, atol=0) for a, b in zip(weights, others, strict=True))
