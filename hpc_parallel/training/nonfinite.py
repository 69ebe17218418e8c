"""Reports losses and gradients that are not finite to the host, and names the rank and the layer to blame.

A step itself only withholds its update, on the device. Nothing waits for the device, unless an optimizer
ignores the flag. In this case the host reads the flag before each update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter

from hpc_parallel.models.drawn_weights import local_of
from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.strategies import exchange
from hpc_parallel.strategies.exchange import FollowerError
from hpc_parallel.strategies.loss_scale import LossScale
from hpc_parallel.torch_internals import tree_leaves
from hpc_parallel.training.optimizer import ModelOptimizer

CHECK_EVERY = 100  # steps between two checks on the host, if no line is logged in between
OUTPUT, GRADIENT = "output", "gradient"
FirstLayers = Mapping[str, tuple[str, str]]
"""OUTPUT or GRADIENT -> (name of the layer, its first value that is not finite), of one rank."""


class NonFiniteError(RuntimeError):
    """Raised on the rank to blame for a step whose loss or gradient is not finite.

    The weights are those before the step. `details` has the `step`, the first affected `parameter` in the
    order of the model, and the `layer` whose output or gradient was the first that is not finite. A
    checkpoint of a later step has the same weights, so a rollback takes an earlier one.
    """

    def __init__(self, message: str, *, step: int, parameter: str | None, layer: str | None) -> None:
        super().__init__(message)
        self.details: dict[str, Any] = {"step": step, "parameter": parameter, "layer": layer}


class Guard:
    """Withholds the optimizer's update of a bad step (skip), or of all later steps too (stop, rollback).

    The gradient's norm is on the device and is the same on all ranks. If it is not finite, the flag
    `withhold` on the device makes the fused optimizer skip its update (`found_inf`, which torch's GradScaler
    also uses). A loss that is not finite makes its gradients not finite (`loss.propagate_nonfinite`). The
    host reads the reason later.
    """

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

        `policy`: stop, skip or rollback. With skip, training goes on after a bad step.

        `buffers`: tensors that a forward pass changes. A skipped step must not change them.

        `loss_scale`: changes in each step. While it can shrink, a step that is not finite is skipped.
        """
        device = next(iter(parameters.values())).device
        self.skips = policy == "skip"
        zeros = partial(torch.zeros, dtype=torch.float32, device=device)  # whatever torch's default is
        self.withhold = zeros(())  # 1: withhold the update of this step
        self.count = zeros(())  # steps withheld since the first bad one
        self.norms = zeros(len(parameters))  # of the gradients in the first bad step
        self.loss = torch.zeros((), dtype=torch.float64, device=device)  # of the first bad step
        self._skipped = zeros(2)  # their number, and the steps since the last one
        self._loss_scale = loss_scale
        self._may_skip = self.skips or loss_scale is not None
        self._buffers = buffers if self._may_skip else []
        self._buffers_before: list[Tensor] = []
        self._parameters = parameters
        self.skipped = self._counts_of_skips()
        optimizer.withhold_by(self.withhold)

    def _counts_of_skips(self) -> Tensor | None:
        """The number of skipped steps and the steps since the last one, on the device; None if none may be.

        With a loss scale, the factors before and after the last one follow.
        """
        factors = [] if self._loss_scale is None else [self._loss_scale.last_skip]
        return torch.cat([self._skipped, *factors]) if self._may_skip else None

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
        overflows = torch.zeros_like(bad) if self._loss_scale is None else self._loss_scale.update(bad)
        skips = bad if self.skips else overflows
        stops = bad & ~skips
        first = stops & (self.count == 0)
        self.norms = torch.where(first, norms.float(), self.norms)
        self.loss = torch.where(first, loss.double(), self.loss)
        self.count += stops | (self.count > 0)
        number, since = self._skipped
        self._skipped.copy_(torch.stack([number + skips, torch.where(skips, 0, since + 1)]))
        self.withhold.copy_(bad | (self.count > 0))
        for buffer, old in zip(self._buffers, self._buffers_before, strict=True):
            buffer.copy_(torch.where(bad, old, buffer))
        self.skipped = self._counts_of_skips()

    def raise_if_nonfinite(self, step: int, *, trace: Callable[[int], FirstLayers]) -> None:
        """Read from the device whether a step up to the 1-based `step` was withheld.

        `trace`: replays a step and returns the result of `trace_layers` on this rank.

        All ranks must call it together. Raises NonFiniteError on the rank to blame and FollowerError on the
        others.
        """
        if self.skips:
            return
        count = self.count.clone()
        if dist.is_initialized():
            dist.all_reduce(count, op=dist.ReduceOp.MAX)  # only a parameter server has the gradient
        if withheld := int(count.item()):
            self._raise(step - withheld + 1, trace=trace)

    def _raise(self, step: int, *, trace: Callable[[int], FirstLayers]) -> NoReturn:
        names = list(self._parameters)
        bad = {names[index] for index in (~self.norms.isfinite()).nonzero().flatten().tolist()}
        local = {
            "loss": str(self.loss.item()),  # JSON has no NaN
            "gradient": min(bad, key=order, default=None),
            "weight": first_nonfinite(self._parameters),
        }
        by_rank = exchange.all_gather(local)
        rank, message, parameter = blame(by_rank, step=step)
        layer = None
        weights_finite = all(values["weight"] is None for values in by_rank)
        if weights_finite and (first := first_clause(exchange.all_gather(trace(step)))) is not None:
            rank, clause, layer = first
            message = f"{message}; {clause}"
        if rank == (dist.get_rank() if dist.is_initialized() else 0):
            raise NonFiniteError(message, step=step, parameter=parameter, layer=layer)
        raise FollowerError(f"ended with rank {rank}: {message}")


def blame(by_rank: Sequence[Mapping[str, Any]], *, step: int) -> tuple[int, str, str | None]:
    """Returns the rank to blame, the message, and the first affected parameter.

    `by_rank`: each rank's `loss`, and its first `weight` and first `gradient` that are not finite.

    The first of these that exists is to blame:
    - a weight that is not finite: an update overflowed, or the weight was not finite when it was loaded;
    - a loss that is not finite. It says nothing about a parameter, because all gradients follow from it;
    - a gradient that is not finite: the first in the order of the model.
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


def first_nonfinite(parameters: Mapping[str, Parameter]) -> str | None:
    """The first weight of this rank, in the order of the model, that has a value which is not finite."""
    broken = {name for name, weight in parameters.items() if not bool(local_of(weight).isfinite().all())}
    return min(broken, key=order, default=None)


def order(name: str) -> tuple[int, int, str]:
    """Sort key of a full name, in the order of the model: the stem, blocks by number, the head."""
    part, _, rest = name.partition(".")
    number = rest.partition(".")[0]
    if part == "blocks" and number.isdigit():
        return 1, int(number), rest
    return {"stem": 0, "head": 2}.get(part, 1), 0, rest


def trace_layers(
    parts: Sequence[LayeredModel],
    *,
    compiled: bool,
    whole: bool,
    replay: Callable[[], object],
) -> FirstLayers:
    """Returns this rank's first layer with an output that is not finite, and the first with such a gradient.

    A withheld step left the weights as they were, so it can run again with hooks on every layer. Hooks would
    be too slow for all steps.

    `replay`: runs the forward and backward passes of the step again; collective over all ranks. If blocks are
    compiled, only the outputs of whole blocks are seen. A model compiled as a `whole` runs uncompiled here.
    """
    finding: dict[str, tuple[str, str]] = {}
    handles = []
    for part in parts:
        for name, module in _layers(part, compiled=compiled and not whole):
            handles.append(module.register_forward_hook(partial(_after_forward, finding, name)))
    try:
        with torch.compiler.set_stance("force_eager") if whole else nullcontext():
            replay()
    finally:
        for handle in handles:
            handle.remove()
    return finding


def _layers(part: LayeredModel, *, compiled: bool) -> Iterable[tuple[str, Module]]:
    if not compiled:
        return [(name, module) for name, module in part.named_modules() if name]
    blocks = [(f"blocks.{name}", block) for name, block in part.blocks.items()]
    ends = [(name, end) for name, end in (("stem", part.stem), ("head", part.head)) if end is not None]
    return [*blocks, *ends]


def _after_forward(
    finding: dict[str, tuple[str, str]], name: str, module: Module, inputs: Any, output: Any
) -> None:
    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            _note(finding, OUTPUT, name, tensor)
            if tensor.requires_grad:
                tensor.register_hook(partial(_note, finding, GRADIENT, name))


@torch.no_grad()
def _note(finding: dict[str, tuple[str, str]], kind: str, name: str, tensor: Tensor) -> None:
    """Keep the first finding of its kind. The host reads the tensor."""
    local = local_of(tensor)
    if kind not in finding and not bool(local.isfinite().all()):
        finding[kind] = name, str(float(local[~local.isfinite()][0]))


def first_clause(by_rank: Sequence[FirstLayers]) -> tuple[int, str, str] | None:
    """Returns the rank, a clause and the layer's name of the first finding of all ranks; None without any.

    A forward pass runs in the `order` of the model, and a backward pass in the reverse order.
    """
    for kind, sign in ((OUTPUT, 1), (GRADIENT, -1)):
        candidates = [
            (tuple(sign * number for number in order(finding[kind][0])[:2]), rank)
            for rank, finding in enumerate(by_rank)
            if kind in finding
        ]
        if candidates:
            _, rank = min(candidates)
            name, value = by_rank[rank][kind]
            subject = "the output" if kind == OUTPUT else "the gradient of the output"
            number = "nan" if math.isnan(float(value)) else value
            return rank, f"{subject} of {name} was the first that is not finite ({number})", name
    return None
