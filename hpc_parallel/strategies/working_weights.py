"""Weights in bfloat16 for a step: each is cast once, and its gradient reaches the float32 weight.

Autocast, by contrast, casts every weight in each forward pass and in each recomputation. It leaves the output
of an embedding in float32, and therefore also the activations between blocks and between stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Embedding, Linear, Module, Parameter, RMSNorm

from hpc_parallel import torch_internals
from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.strategies.precision import HALF
from hpc_parallel.torch_internals import Convolution, parameters_of

KINDS = (Linear, Embedding, Convolution, RMSNorm)
"""Modules that compute in the type of their weights; torch's fused RMSNorm needs inputs of the same type.

All other weights stay float32: autocast computes with them in float32, or casts them.
"""


def cast_for_good(model: LayeredModel) -> None:
    """Replace the weights of a `model` that is never trained by their casts. A shared weight stays shared.

    `Parameter.data` of a DTensor can't be set: its local tensor would stay float32.
    """
    originals = {id(weights[name]): weights[name] for weights, name in _places(model)}
    casts: dict[int, Parameter] = {}
    for key, weight in originals.items():
        assert isinstance(weight, Parameter)
        casts[key] = Parameter(weight.detach().to(HALF["bfloat16"]), weight.requires_grad)
    for table in map(parameters_of, model.modules()):  # a module of another kind may share the weight
        table.update({name: casts[id(weight)] for name, weight in table.items() if id(weight) in casts})


@contextmanager
def cast_weights(parts: Sequence[Module]) -> Iterator[None]:
    """Let the modules of `parts` hold casts of their weights. A shared weight has one cast.

    The backward passes of all microbatches go through the same cast, which saves no tensor for backward.
    """
    casts: dict[int, Tensor] = {}
    replaced: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
    try:
        for part in parts:
            for weights, name in _places(part):
                weight = weights[name]
                assert weight is not None
                if id(weight) not in casts:
                    casts[id(weight)] = cast(weight)
                replaced.append((weights, name, weight))
                weights[name] = casts[id(weight)]
        yield
    finally:
        for weights, name, weight in replaced:
            weights[name] = weight


def cast(weight: Tensor) -> Tensor:
    """`weight` in bfloat16, for autograd too.

    The casts are recorded before the forward pass, and autograd runs the first recorded operation last.
    Without `hasten`, no weight would have its gradient, and no gradient would be sent to other ranks, before
    the backward pass of the whole model is done.
    """
    half: Tensor = weight.to(HALF["bfloat16"]) if isinstance(weight, DTensor) else Cast.apply(weight)
    if half.requires_grad:
        torch_internals.hasten(half)
    return half


class Cast(torch.autograd.Function):
    """A cast whose backward pass widens the gradient by torch's foreach kernel.

    `Tensor.to` from bfloat16 to float32 moves 1 TB/s on an H200: 7.4 ms of a step of 138 ms.
    """

    @staticmethod
    def forward(ctx: object, weight: Tensor) -> Tensor:
        return weight.to(HALF["bfloat16"])

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        wide = torch.empty_like(gradient, dtype=torch.float32)
        torch_internals.copy_into([gradient], [wide])
        return wide


def _places(model: Module) -> Iterator[tuple[dict[str, Tensor | None], str]]:
    """The tables of weights and the names to cast; a weight that is already cast is left out."""
    for module in model.modules():
        weights = parameters_of(module)
        if isinstance(module, KINDS) and getattr(weights.get("weight"), "dtype", None) == torch.float32:
            yield weights, "weight"
