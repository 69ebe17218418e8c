"""The loss of a rank, the number of its terms and, in evaluation, the model's metrics.

A model's own metrics (`LayeredModel.metrics`) are sums over the terms of the loss, so schedules add up and
average metrics and loss in the same way. In evaluation the loss function returns a vector: the loss and then
the metrics.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hpc_parallel.models.layered import LayeredModel, Loss
from hpc_parallel.strategies.mesh import name_of
from hpc_parallel.strategies.ranges import marked
from hpc_parallel.user_code import UserCodeError

MetricsOf = Callable[[Tensor, Tensor], Mapping[str, Tensor]]
"""(head's output, targets) -> sums over the terms of the loss, by name, as `LayeredModel.metrics`."""
_NAME = re.compile(r"[a-z][a-z0-9_]*")
RESERVED = ("loss",)
ROUNDING = 0.01  # tolerance as a share of a sum, far above the rounding of bfloat16


class LossTerms:
    """Counts the terms of a batch, so that the mean of the ranks' mean losses equals one device's loss."""

    def __init__(self, model: LayeredModel, *, weight: float = 1.0, axis: DeviceMesh | None = None) -> None:
        """`weight`: the factor of this replica's mean loss (`BatchPlan.weight`).

        `axis`: the ranks with the other targets of the batch; needed if the model ignores some targets.
        """
        self._model = model
        self._weight = weight
        self._axis = axis

    def __call__(self, targets: Tensor) -> float | Tensor:
        """The number of terms in this rank's `targets` [batch, ...]; the mean over ranks if any are ignored.

        The count stays on the device, a scalar in float32. Without any term it is 1, and the loss is 0.
        """
        ignored = self._model.ignore_index
        if ignored is None:
            return self._model.loss_terms(targets) / self._weight
        count = (targets != ignored).sum(dtype=torch.float32)
        if self._axis is not None:
            with marked(f"all_reduce {name_of(self._axis)}"):
                dist.all_reduce(count, group=self._axis.get_group())
            count /= self._axis.size()
        return torch.where(count > 0, count, 1.0)


def propagate_nonfinite(loss: Tensor) -> Tensor:
    """Returns `loss` with its own gradients if it is finite, otherwise NaN with gradients of NaN.

    The derivative of an infinite cross-entropy is finite, so only the rank that has the loss would notice.
    All ranks see the gradients.
    """
    return loss * (1 + 0 * loss.detach())


class WithMetrics:
    """A loss function that returns [loss, *metrics] if gradients are off.

    `names`: the names of these metrics.
    """

    def __init__(self, loss: Loss, metrics: MetricsOf, *, model: str) -> None:
        """`model`: the name of the class, for messages."""
        self._loss, self._metrics, self._model = loss, metrics, model
        self.names: tuple[str, ...] = ()

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        loss = self._loss(output, target)
        if torch.is_grad_enabled():
            return loss
        values = self._metrics(output, target)
        if tuple(values) != self.names:
            for name, value in values.items():
                self._require(name, value)
            self._require_sums(values, output, target)
            self.names = tuple(values)
        return torch.stack([loss, *(value.to(loss.dtype) for value in values.values())])

    def _require(self, name: object, value: object) -> None:
        """Raises UserCodeError if `name` or `value` is not legal for a metric."""
        text = str(name)
        if not _NAME.fullmatch(text) or text in RESERVED:
            rule = "a name has small letters, digits and underscores, and is not loss"
            raise UserCodeError([f"{self._model}.metrics returned {text!r}: {rule}"])
        shape = list(value.shape) if isinstance(value, Tensor) else None
        if shape != []:
            what = type(value).__name__ if shape is None else f"a tensor of shape {shape}"
            rule = "it must be one number in a tensor, a sum over the terms of the loss"
            raise UserCodeError([f"{self._model}.metrics returned {what} for {text}: {rule}"])

    def _require_sums(self, values: Mapping[str, Tensor], output: Tensor, target: Tensor) -> None:
        """Raises UserCodeError if the values for the two halves of the samples don't add up to `values`."""
        if len(output) < 2 or len(output) != len(target):
            return
        halves = [self._metrics(*half) for half in zip(output.chunk(2), target.chunk(2), strict=True)]
        for name, value in values.items():
            parts = torch.stack([half[name] for half in halves]).double()
            if bool((parts.sum() - value).abs() > ROUNDING * parts.abs().sum()):
                raise UserCodeError([
                    f"{self._model}.metrics returned {name}, which is not the sum of its values for both "
                    "halves of the samples: return a sum, not a mean"
                ])  # fmt: skip
