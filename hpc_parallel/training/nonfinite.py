"""Reports losses and gradients that are not finite to the host, and names the rank and the layer to blame.

A step itself only withholds its update, on the device (`gradients.Withholding`). Nothing waits for the
device, unless an optimizer ignores the flag. In this case the host reads the flag before each update.
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
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.strategies import exchange
from hpc_parallel.strategies.exchange import FollowerError
from hpc_parallel.strategies.gradients import Withholding
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


class Guard(Withholding):
    """Withholds updates, and reports the reason to the host."""

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

        `policy`: stop, skip or rollback. The other arguments are those of `Withholding`.
        """
        device = next(iter(parameters.values())).device
        super().__init__(
            len(parameters), device=device, skips=policy == "skip", buffers=buffers, loss_scale=loss_scale
        )
        self._parameters = parameters
        optimizer.withhold_by(self.withhold)

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
    broken = {name for name, weight in parameters.items() if not _is_finite(weight)}
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
    whole: bool = False,
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
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if kind not in finding and not bool(local.isfinite().all()):
        finding[kind] = name, str(float(local[~local.isfinite()][0]))


def first_clause(
    by_rank: Sequence[FirstLayers], *, order: Callable[[str], tuple[int, int, str]]
) -> tuple[int, str, str] | None:
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


def _all_gather(value: Any) -> list[Any]:
    return exchange.all_gather(value) if dist.is_initialized() else [value]


def _is_finite(weight: Tensor) -> bool:
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    return bool(local.isfinite().all())
