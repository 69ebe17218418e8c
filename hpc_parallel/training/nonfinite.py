"""A loss or gradient that is not finite never reaches the weights, and the host learns of it later.

The gradient's norm is on the device and equal on all ranks. If it is not finite, a flag on the device makes
the fused optimizer leave weights and state as they are (`found_inf`, as of torch's GradScaler). A loss that
is not finite makes its gradients so (`propagate_nonfinite`). The host does not wait for the device.
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

CHECK_EVERY = 100  # steps after which the host checks, if no logged line was due


class NonFiniteError(RuntimeError):
    """Raised on the rank that caused a loss or gradient that is not finite; the weights are those before it.

    `details`: the `step`, and the first affected `parameter` in the order of the model. A checkpoint of a
    later step contains no update since, so a rollback takes one of an earlier step.
    """

    def __init__(self, message: str, *, step: int, parameter: str | None) -> None:
        super().__init__(message)
        self.details: dict[str, Any] = {"step": step, "parameter": parameter}


class FollowerError(RuntimeError):
    """Raised on a rank that ends because another rank failed."""


class Guard:
    """Holds back updates of `optimizer`: of a bad step (skip), or of it and all later (stop, rollback)."""

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        *,
        optimizer: Optimizer,
        policy: str,
        buffers: Sequence[Tensor],
    ) -> None:
        """Let the optimizer read the flag.

        `parameters`: this rank's by full name, in the order in which `note` gets their norms. `buffers`:
        values that a forward pass changes, and that a skipped step must not change.
        """
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
        """The number of skipped steps, on the device. None under another policy."""
        return self._count.clone() if self._skips else None

    @torch.no_grad()
    def before(self) -> None:
        """Copy the buffers that a forward pass changes."""
        self._before = [buffer.clone() for buffer in self._buffers]

    @torch.no_grad()
    def note(self, *, norm: Tensor, norms: Tensor, loss: Tensor) -> None:
        """Decide on this step by the `norm` of the full gradient, which is equal on all ranks.

        `norms`: of each parameter of this rank. `loss`: this rank's.
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

    def raise_if_nonfinite(self, step: int) -> None:
        """Check on all ranks whether a step up to the 1-based `step` was held back.

        Raises NonFiniteError on the rank that caused it and FollowerError on the others.
        """
        if self._skips:
            return
        count = self._count.clone()
        if dist.is_initialized():
            dist.all_reduce(count, op=dist.ReduceOp.MAX)  # only a parameter server knows the gradient
        if held := int(count.item()):
            self._blame(step - held + 1)

    def _blame(self, step: int) -> None:
        """Blame the first rank whose loss is not finite, else the one with the first such gradient."""
        names = list(self._parameters)
        bad = {names[index] for index in (~self._norms.isfinite()).nonzero().flatten().tolist()}
        broken = {name for name, weight in self._parameters.items() if not _is_finite(weight)}
        local = {
            "loss": str(self._loss.item()),  # JSON has no NaN
            "gradient": min(bad, key=order, default=None),
            "weight": min(broken, key=order, default=None),
        }  # fmt: skip
        records = exchange.all_gather(local) if dist.is_initialized() else [local]
        rank, message, parameter = blame(records, step=step)
        if rank == (dist.get_rank() if dist.is_initialized() else 0):
            raise NonFiniteError(message, step=step, parameter=parameter)
        raise FollowerError(f"ended with rank {rank}: {message}")


def blame(records: Sequence[Mapping[str, Any]], *, step: int) -> tuple[int, str, str | None]:
    """Returns the rank, the message and the first affected parameter, from the records of all ranks.

    A weight that is not finite (because an update overflowed, or the loaded file was bad) is the cause of
    everything else. A loss that is not finite identifies the rank but no parameter: all gradients follow it.
    """
    for what, words in (("weight", "the weight"), ("gradient", "the gradient of")):
        named = [(order(rank[what]), place) for place, rank in enumerate(records) if rank[what] is not None]
        losses = [place for place, rank in enumerate(records) if not math.isfinite(float(rank["loss"]))]
        first = min(named, default=None)
        name = None if first is None else records[first[1]][what]
        if what == "gradient" and losses:
            place = losses[0]
            follows = f"; of the gradients {name} is the first" if name else ""
            return place, f"the loss of step {step} is {records[place]['loss']}{follows}", name
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
