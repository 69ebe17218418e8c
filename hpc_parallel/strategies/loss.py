"""The loss of a rank, the number of its terms and, in evaluation, the model's metrics.

A model's own metrics (`LayeredModel.metrics`) are sums over the terms of the loss, so schedules add up the
loss, the number of its terms and the metrics in the same way. In evaluation the loss function returns a
vector: the loss, the number of its terms and then the metrics.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hpc_parallel.models.layered import LayeredModel, Loss
from hpc_parallel.strategies.mesh import all_reduce
from hpc_parallel.user_code import UserCodeError

MetricsOf = Callable[[Tensor, Tensor], Mapping[str, Tensor]]
"""(head's output, targets) -> sums over the terms of the loss, by name, as `LayeredModel.metrics`."""
TermsOf = Callable[[Tensor], float | Tensor]
"""Targets [batch, ...] -> the number of terms of the loss, on the device if some targets are ignored."""
_NAME = re.compile(r"[a-z][a-z0-9_]*")
RESERVED = ("loss",)
ROUNDING = 0.01  # tolerance as a share of a sum, far above the rounding of bfloat16


def count_terms(model: LayeredModel, targets: Tensor) -> int | Tensor:
    """The number of terms of the loss of `targets` [batch, ...]; on the device if some may be ignored."""
    ignored = model.ignore_index
    return model.loss_terms(targets) if ignored is None else (targets != ignored).sum()


@dataclass(frozen=True)
class LossTerms:
    """Counts the terms of a batch, so that the mean of the ranks' mean losses equals one device's loss.

    weight: the factor of this replica's mean loss (`BatchPlan.weight`). axis: the ranks with the other
    targets of the batch; needed if the model ignores some targets.
    """

    model: LayeredModel
    weight: float = 1.0
    axis: DeviceMesh | None = None

    def __call__(self, targets: Tensor) -> float | Tensor:
        """The number of terms in this rank's `targets` [batch, ...]; the mean over ranks if any are ignored.

        The count stays on the device, a scalar in float32. Without any term it is 1, and the loss is 0.
        """
        if self.model.ignore_index is None:
            return count_terms(self.model, targets) / self.weight
        count = torch.as_tensor(count_terms(self.model, targets), dtype=torch.float32)
        if self.axis is not None:
            count = all_reduce(count, axis=self.axis) / self.axis.size()
        return torch.where(count > 0, count, 1.0)


def propagate_nonfinite(loss: Tensor) -> Tensor:
    """Returns `loss` with its own gradients if it is finite, otherwise NaN with gradients of NaN.

    The derivative of an infinite cross-entropy is finite, so only the rank that has the loss would notice.
    All ranks see the gradients.
    """
    return loss * (1 + 0 * loss.detach())


class WithMetrics:
    """A loss function that returns [loss, terms, *metrics] in float64 if gradients are off.

    `names`: the names of these metrics; empty on a rank that has computed none.
    """

    def __init__(self, loss: Loss, metrics: MetricsOf, *, terms: TermsOf, model: str) -> None:
        """`model`: the name of the class, for messages."""
        self._loss, self._metrics, self._terms, self._model = loss, metrics, terms, model
        self.names: tuple[str, ...] = ()
        self._counts: Iterator[int] = iter(())
        self._cut = False  # whether a batch was ever cut

    def begin_batch(self, counts: Sequence[int]) -> None:
        """Let only the first `counts[m]` samples of the next batch's microbatch m count.

        Stages have fixed shapes, so the last batch is filled with samples that pass the model but not the
        loss. Schedules compute the losses in the order of the microbatches.
        """
        self._counts = iter(counts)

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return self._loss(output, target)
        size = len(target)
        count = next(self._counts, size)
        if count == 0:  # the loss of no samples need not be defined
            return torch.zeros(2 + len(self.names), dtype=torch.float64, device=target.device)
        if count < size:
            self._require_rows(output, target, count=count)
            (output, target), _ = _divide(output, target, first=count)
        values: Any = self._metrics(output, target)
        if not isinstance(values, Mapping):
            rule = "it must be a dict of sums over the terms of the loss"
            raise UserCodeError([f"{self._model}.metrics returned a {type(values).__name__}: {rule}"])
        if tuple(values) != self.names:
            for name, value in values.items():
                self._require(name, value)
            self._require_sums(values, output, target)
            self.names = tuple(values)
        sums = (self._loss(output, target), self._terms(target), *values.values())
        return torch.stack([_double(value, device=target.device) for value in sums])

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

    def _require_sums(self, values: Mapping[str, Tensor], output: Any, target: Tensor) -> None:
        """Raises UserCodeError if the values for the two halves of the samples don't add up to `values`."""
        parts = output if isinstance(output, tuple) else (output,)
        if len(target) < 2 or any(len(part) != len(target) for part in parts):
            return
        halves = [self._metrics(*half) for half in _divide(output, target, first=len(target) // 2)]
        for name, value in values.items():
            if not _adds_up([half[name] for half in halves], value):
                raise UserCodeError([
                    f"{self._model}.metrics returned {name}, which is not the sum of its values for both "
                    "halves of the samples: return a sum, not a mean"
                ])  # fmt: skip

    def _require_rows(self, output: Any, target: Tensor, *, count: int) -> None:
        """Raises UserCodeError if the loss of the first `count` samples can't be computed by itself."""
        if self._cut:
            return
        if _has_rows(output, of=len(target)):
            with suppress(RuntimeError, ValueError):  # shapes that don't fit
                losses = [self._loss(*part) for part in _divide(output, target, first=count)]
                self._cut = _adds_up(losses, self._loss(output, target))
        if not self._cut:
            raise UserCodeError([
                f"{self._model}.loss of {len(target)} samples is not the sum for {count} and for the rest. "
                "A validation needs this sum, unless training.global_batch_size divides the number of its "
                "samples: let the output's first dim be the samples."
            ])  # fmt: skip


def _double(value: float | Tensor, *, device: torch.device) -> Tensor:
    """A scalar in float64. A number is filled in on the device: a copy would wait for it."""
    if isinstance(value, Tensor):
        return value.double()
    return torch.full((), value, dtype=torch.float64, device=device)


def _has_rows(output: Any, *, of: int) -> bool:
    """Whether the first dim of `output`, a tensor or a tuple of tensors, is divided by `of` samples."""
    if isinstance(output, tuple):
        return all(_has_rows(part, of=of) for part in output)
    return isinstance(output, Tensor) and output.dim() > 0 and len(output) % of == 0


def _divide(output: Any, target: Tensor, *, first: int) -> list[tuple[Any, Tensor]]:
    """Outputs and targets of the `first` samples, and of the others."""
    size = len(target)
    parts = ((0, first), (first, size))
    return [(_rows(output, *ends, of=size), target[slice(*ends)]) for ends in parts]


def _rows(output: Any, first: int, end: int, *, of: int) -> Any:
    """The rows of `output` for the samples from `first` to `end`, without it, of `of` samples."""
    if isinstance(output, tuple):
        return tuple(_rows(part, first, end, of=of) for part in output)
    rows = len(output) // of  # of one sample
    return output[first * rows : end * rows]


def _adds_up(parts: Sequence[Tensor], whole: Tensor) -> bool:
    values = torch.stack(list(parts)).double()
    return not bool((values.sum() - whole).abs() > ROUNDING * values.abs().sum())
