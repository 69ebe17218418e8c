"""A loss or gradient that is not finite never reaches the weights, and the host hears of it late.

The gradient's norm is on the device and the same on all ranks anyway; where it is not finite, so is a flag
by which the fused optimizer leaves weights and state as they are (`found_inf`, as of torch's GradScaler).
A loss that is not finite makes its gradients so (`propagate_nonfinite`). Nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import Optimizer

from hpc_parallel.strategies import exchange
from hpc_parallel.torch_internals import hold_updates_by

LOOK_EVERY = 100  # steps after which the host asks, if no logged line has been due


class NonFiniteError(RuntimeError):
    """The rank to blame for a step whose loss or gradient is not finite; the weights are those before it.

    `details`: the `step`, and the first `parameter` concerned in the order of the model. A checkpoint of
    a later step has seen no update since, so a rollback takes one of a step before.
    """

    def __init__(self, message: str, *, step: int, parameter: str | None) -> None:
        super().__init__(message)
        self.details: dict[str, Any] = {"step": step, "parameter": parameter}


class FollowerError(RuntimeError):
    """This rank ends because another one is to blame."""


class Guard:
    """Holds back updates by `optimizer`, of that step (skip) or of all that follow too (stop, rollback)."""

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        *,
        optimizer: Optimizer,
        policy: str,
        buffers: Sequence[Tensor],
    ) -> None:
        """`parameters`: this rank's by full name, in the order in which `note` gets their norms;
        `buffers`: what a forward pass changes, which a skipped step must not."""
        self._parameters = parameters
        self._skips = policy == "skip"
        device = next(iter(parameters.values())).device
        self._held = torch.zeros((), device=device)  # 1: this step changes nothing
        self._count = torch.zeros((), device=device)  # steps held back so far
        self._norms = torch.zeros(len(parameters), device=device)  # of the first such step, a parameter each
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        hold_updates_by(self._held, optimizer)
        self._buffers = buffers if self._skips else []
        self._before: list[Tensor] = []

    @property
    def skipped(self) -> Tensor | None:
        """How many steps were left out, on the device; None where the policy is another."""
        return self._count.clone() if self._skips else None

    @torch.no_grad()
    def before(self) -> None:
        """Remember what a forward pass changes."""
        self._before = [buffer.clone() for buffer in self._buffers]

    @torch.no_grad()
    def note(self, *, norm: Tensor, norms: Tensor, loss: Tensor) -> None:
        """Decide on this step by the whole gradient's `norm`, which is the same on all ranks.

        `norms`: of this rank's parameters each; `loss`: this rank's.
        """
        bad = ~norm.isfinite()
        if self._skips:
            self._held.copy_(bad)
        else:
            first = bad & (self._count == 0)
            self._norms = torch.where(first, norms.float(), self._norms)
            self._loss = torch.where(first, loss.double(), self._loss)
            self._held.copy_(bad | (self._count > 0))
        self._count += self._held
        for buffer, old in zip(self._buffers, self._before, strict=True):
            buffer.copy_(torch.where(bad, old, buffer))

    def look(self, step: int) -> None:
        """Ask the device whether a step up to the 1-based `step` was held back, on all ranks together.

        Raises NonFiniteError on the rank to blame and FollowerError on the others.
        """
        if self._skips:
            return
        count = self._count.clone()
        if dist.is_initialized():
            dist.all_reduce(count, op=dist.ReduceOp.MAX)  # a parameter server alone knows the gradient
        if held := int(count.item()):
            self._blame(step - held + 1)

    def _blame(self, step: int) -> None:
        """By the first rank whose loss is not finite, else by the one with the first such gradient."""
        names = list(self._parameters)
        bad = {names[index] for index in (~self._norms.isfinite()).nonzero().flatten().tolist()}
        broken = {name for name, weight in self._parameters.items() if not _is_finite(weight)}
        here = {
            "loss": str(self._loss.item()),  # JSON has no NaN
            "gradient": min(bad, key=order, default=None),
            "weight": min(broken, key=order, default=None),
        }  # fmt: skip
        everywhere = exchange.all_gather(here) if dist.is_initialized() else [here]
        rank, message, parameter = blame(everywhere, step=step)
        if rank == (dist.get_rank() if dist.is_initialized() else 0):
            raise NonFiniteError(message, step=step, parameter=parameter)
        raise FollowerError(f"ended with rank {rank}: {message}")


def blame(found: Sequence[Mapping[str, Any]], *, step: int) -> tuple[int, str, str | None]:
    """The rank, what to say, and the first parameter concerned, from what each rank found.

    A weight that is not finite itself (by an update that overflowed, by what it was loaded from) is the
    cause of all else; a loss that is not tells its rank, but not a parameter, as all gradients follow it.
    """
    for what, words in (("weight", "the weight"), ("gradient", "the gradient of")):
        named = [(order(rank[what]), place) for place, rank in enumerate(found) if rank[what] is not None]
        losses = [place for place, rank in enumerate(found) if not math.isfinite(float(rank["loss"]))]
        first = min(named, default=None)
        name = None if first is None else found[first[1]][what]
        if what == "gradient" and losses:
            place = losses[0]
            follows = f"; of the gradients {name} is the first" if name else ""
            return place, f"the loss of step {step} is {found[place]['loss']}{follows}", name
        if first is not None:
            return first[1], f"{words} {name} is not finite at step {step}", name
    return 0, f"the gradient's norm is not finite at step {step}: its squares overflow", None


def order(name: str) -> tuple[int, int, str]:
    """Sorts full names as a batch passes the model: the stem, blocks by number, the head."""
    part, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    if part == "blocks" and number.isdigit():
        return 1, int(number), rest
    return {"stem": 0, "head": 2}.get(part, 1), 0, rest


def _is_finite(weight: Tensor) -> bool:
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    return bool(local.isfinite().all())
