"""Keeps losses and gradients that are not finite from the weights, and reports them to the host later.

The gradient's norm is on the device and is the same on all ranks. If it is not finite, a flag on the device
makes the fused optimizer skip its update (`found_inf`, which torch's GradScaler also uses). A loss that is
not finite makes its gradients not finite (`propagate_nonfinite`). Nothing waits for the device, unless an
optimizer ignores the flag: then the host reads it before each update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from hpc_parallel.strategies import exchange
from hpc_parallel.strategies.loss_scale import LossScale
from hpc_parallel.training.nonfinite_trace import FirstLayers, first_clause
from hpc_parallel.training.optimizer import ModelOptimizer

CHECK_EVERY = 100  # steps between two checks on the host, if no line is logged in between


class NonFiniteError(RuntimeError):
    """Raised on the rank to blame for a step whose loss or gradient is not finite.

    The weights are those before the step. `details` has the `step`, the first affected `parameter` in the
    order of the model, and the `layer` whose output or gradient was the first that is not finite. A
    checkpoint of a later step has the same weights, so a rollback takes an earlier one.
    """

    def __init__(self, message: str, *, step: int, parameter: str | None, layer: str | None) -> None:
        super().__init__(message)
        self.details: dict[str, Any] = {"step": step, "parameter": parameter, "layer": layer}


class FollowerError(RuntimeError):
    """Raised on the ranks that end because another rank is to blame."""


class Guard:
    """Withholds the optimizer's update of a bad step (skip), or of all later steps too (stop, rollback)."""

    def __init__(
        self,
        parameters: Mapping[str, Parameter],
        *,
        optimizer: ModelOptimizer,
        policy: str,
        buffers: Sequence[Tensor],
        loss_scale: LossScale | None = None,
    ) -> None:
        """`parameters`: this rank's, by full name, in the order of `norms` in `note`.

        `buffers`: tensors that a forward pass changes. A skipped step must not change them.

        `loss_scale`: changes in each step. While it can shrink, a step that is not finite is skipped.
        """
        self._parameters = parameters
        self._skips = policy == "skip"
        device = next(iter(parameters.values())).device
        self._withhold = torch.zeros((), device=device)  # 1: withhold the update of this step
        self._count = torch.zeros((), device=device)  # steps withheld since the first bad one
        self._skipped = torch.zeros((), device=device)
        self._loss_scale = loss_scale
        self._may_skip = self._skips or loss_scale is not None
        self._norms = torch.zeros(len(parameters), device=device)  # [parameter], of the first bad step
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        optimizer.withhold_by(self._withhold)
        self._buffers = buffers if self._may_skip else []
        self._buffers_before: list[Tensor] = []

    @property
    def skipped(self) -> Tensor | None:
        """The number of skipped steps, on the device; None if none may be."""
        return self._skipped.clone() if self._may_skip else None

    @torch.no_grad()
    def remember_buffers(self) -> None:
        """Copy the buffers before the forward pass, so that a skipped step can restore them."""
        self._buffers_before = [buffer.clone() for buffer in self._buffers]

    @torch.no_grad()
    def note(self, *, norm: Tensor, norms: Tensor, loss: Tensor) -> None:
        """Withhold this step's update if the `norm` of the complete gradient is not finite.

        `norm` is the same on all ranks. `norms` [parameter] and `loss` are this rank's.
        """
        bad = ~norm.isfinite()
        skips = self._skips_step(bad)
        stops = bad & ~skips
        first = stops & (self._count == 0)
        self._norms = torch.where(first, norms.float(), self._norms)
        self._loss = torch.where(first, loss.double(), self._loss)
        self._count += stops | (self._count > 0)
        self._skipped += skips
        self._withhold.copy_(bad | (self._count > 0))
        for buffer, old in zip(self._buffers, self._buffers_before, strict=True):
            buffer.copy_(torch.where(bad, old, buffer))

    def _skips_step(self, bad: Tensor) -> Tensor:
        """Whether training goes on after this `bad` step."""
        overflows = torch.zeros_like(bad) if self._loss_scale is None else self._loss_scale.update(bad)
        return bad if self._skips else overflows

    def raise_if_nonfinite(self, step: int, *, trace: Callable[[int], FirstLayers]) -> None:
        """Read from the device whether a step up to the 1-based `step` was withheld.

        `trace`: what `nonfinite_trace.trace` shows in a replay of that step, on this rank.

        All ranks must call it together. Raises NonFiniteError on the rank to blame and FollowerError on the
        others.
        """
        if self._skips:
            return
        count = self._count.clone()
        if dist.is_initialized():
            dist.all_reduce(count, op=dist.ReduceOp.MAX)  # only a parameter server has the gradient
        if withheld := int(count.item()):
            self._raise(step - withheld + 1, trace=trace)

    def _raise(self, step: int, *, trace: Callable[[int], FirstLayers]) -> NoReturn:
        names = list(self._parameters)
        bad = {names[index] for index in (~self._norms.isfinite()).nonzero().flatten().tolist()}
        broken = {name for name, weight in self._parameters.items() if not _is_finite(weight)}
        local = {
            "loss": str(self._loss.item()),  # JSON has no NaN
            "gradient": min(bad, key=order, default=None),
            "weight": min(broken, key=order, default=None),
        }  # fmt: skip
        by_rank = _all_gather(local)
        rank, message, parameter = blame(by_rank, step=step)
        layer = None
        weights_finite = all(values["weight"] is None for values in by_rank)
        if weights_finite and (first := first_clause(_all_gather(trace(step)), order=order)) is not None:
            rank, clause, layer = first
            message = f"{message}; {clause}"
        if rank == (dist.get_rank() if dist.is_initialized() else 0):
            raise NonFiniteError(message, step=step, parameter=parameter, layer=layer)
        raise FollowerError(f"ended with rank {rank}: {message}")


def blame(by_rank: Sequence[Mapping[str, Any]], *, step: int) -> tuple[int, str, str | None]:
    """Returns the rank to blame, the message, and the first affected parameter.

    `by_rank`: each rank's `loss`, and its first `weight` and first `gradient` that are not finite.

    The first of these is to blame: a weight that is not finite (an update overflowed, or it was loaded so);
    a loss that is not finite, which says nothing about a parameter because all gradients follow from it;
    a gradient, the first in the order of the model.
    """
    for kind, subject in (("weight", "the weight"), ("gradient", "the gradient of")):
        candidates = [
            (order(values[kind]), rank) for rank, values in enumerate(by_rank) if values[kind] is not None
        ]
        bad_losses = [rank for rank, values in enumerate(by_rank) if not math.isfinite(float(values["loss"]))]
        first = min(candidates, default=None)
        name = None if first is None else by_rank[first[1]][kind]
        if kind == "gradient" and bad_losses:
            rank = bad_losses[0]
            gradient = f"; the first gradient that is not finite is that of {name}" if name else ""
            return rank, f"the loss of step {step} is {by_rank[rank]['loss']}{gradient}", name
        if first is not None:
            return first[1], f"{subject} {name} is not finite at step {step}", name
    return 0, f"the gradient's norm is not finite at step {step}: its squares overflow", None


def order(name: str) -> tuple[int, int, str]:
    """Sort key of a full name, in the order of the model: the stem, blocks by number, the head."""
    part, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    if part == "blocks" and number.isdigit():
        return 1, int(number), rest
    return {"stem": 0, "head": 2}.get(part, 1), 0, rest


def _all_gather(value: Any) -> list[Any]:
    return exchange.all_gather(value) if dist.is_initialized() else [value]


def _is_finite(weight: Tensor) -> bool:
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    return bool(local.isfinite().all())
