"""Optimizers and schedules of a user's own."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer


class Lion(Optimizer):
    """Chen et al. 2023, algorithm 2; decay multiplies the learning rate."""

    def __init__(
        self,
        parameters: list[Parameter],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self.update(weight, weight.grad, group)

    def update(self, weight: Parameter, gradient: Tensor, group: dict) -> None:
        state = self.state[weight]
        if not state:
            state["exp_avg"] = torch.zeros_like(weight)
        momentum, (beta1, beta2) = state["exp_avg"], group["betas"]
        direction = momentum.lerp(gradient, 1 - beta1).sign()
        weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * direction)
        momentum.lerp_(gradient, 1 - beta2)


class Noisy(Lion):
    """Draws random numbers."""

    def update(self, weight: Parameter, gradient: Tensor, group: dict) -> None:
        super().update(weight, gradient + torch.randn_like(gradient), group)


class Coupled(Lion):
    """Divides by the norm of all gradients that it sees, if that is more than 5."""

    def update(self, weight: Parameter, gradient: Tensor, group: dict) -> None:
        norms = [other.grad.norm() for other in group["params"] if other.grad is not None]
        weight.sub_(group["lr"] * gradient / torch.stack(norms).norm().clamp(min=5.0))


class Counting(Lion):
    """Keeps the number of its steps in the group and a factor in each weight's state, and uses both."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        super().step()

    def update(self, weight: Parameter, gradient: Tensor, group: dict) -> None:
        super().update(weight, gradient, group)
        state = self.state[weight]
        state["factor"] = state.get("factor", 1.0) * 0.7
        weight.sub_(group["lr"] * state["factor"] / group["steps"] * gradient)


class Summing(Lion):
    """Keeps a sum over the gradients of all its weights, before it uses it."""

    def update(self, weight: Parameter, gradient: Tensor, group: dict) -> None:
        group["sum"] = group.get("sum", 0.0) + float(gradient.norm())
        super().update(weight, gradient, group)


class Forgetful(Lion):
    """Keeps a list in the state and a tensor in the group."""

    def update(self, weight: Parameter, gradient: Tensor, group: dict) -> None:
        super().update(weight, gradient, group)
        self.state[weight]["parts"] = [gradient.norm()]
        group["norm"] = gradient.norm()


class Numbered(Lion):
    """Counts its steps in itself and does not use the count."""

    count = 0

    def update(self, weight: Parameter, gradient: Tensor, group: dict) -> None:
        self.count += 1
        super().update(weight, gradient, group)


class Restless(Numbered):
    """Uses a count that it keeps in itself."""

    def update(self, weight: Parameter, gradient: Tensor, group: dict) -> None:
        super().update(weight, gradient / (1 + self.count // len(group["params"])), group)
        weight.sub_(group["lr"] / self.count)


class Decaying(Lion):
    """Halves its own weight decay in each step."""

    def update(self, weight: Parameter, gradient: Tensor, group: dict) -> None:
        group["weight_decay"] *= 0.5
        super().update(weight, gradient, group)


class Averaging(Lion):
    """Has two sets of weights, as optimizers without a schedule have (Defazio et al. 2024)."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


def triangle(step: int, steps: int) -> float:
    return 1 - abs(2 * step / steps - 1)


def halved(step: int, steps: int) -> np.float32:
    return np.float32(0.5)


def endless(step: int, steps: int) -> float:
    return float("inf")
