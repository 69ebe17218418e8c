"""Stochastic rounding to bfloat16 by counted noise, the same on every layout.

A number is rounded up with the probability of its distance from the lower neighbour, so the mean over many
steps is exact. Rounding to the nearest neighbour would lose every update that is smaller than half the
distance between two neighbours, 2^-9 of a weight (Gupta et al. 2015; Zamirai et al. 2020). The noise is a
hash of the seed, the weight's name, the step and the element's place in the whole weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.models.drawn_weights import cut, tensor_seed
from hpc_parallel.strategies.dropout.counted_dropout import mix64, uniform_bits

DROPPED = 16  # bits of a float32 that a bfloat16 does not have


@dataclass(frozen=True)
class RandomRounding:
    """What is kept in bfloat16: `weights`, the optimizer's `state`, or both. seed: of the noise."""

    seed: int
    weights: bool
    state: bool


def rounding_of(config: RunConfig) -> RandomRounding | None:
    """None if a run keeps nothing in bfloat16."""
    weights, state = (kept == "bfloat16" for kept in (config.training.weights, config.optimizer.state))
    return RandomRounding(config.seed, weights, state) if weights or state else None


class Noise:
    """The noise of one weight in one step, for some rows of this rank's part."""

    def __init__(self, name: str, coordinates: Sequence[Tensor], *, seed: int, step: int) -> None:
        """coordinates: the places of the elements in each dim of the whole weight, as of `coordinates_of`."""
        self._seed, self._source, self._coordinates = seed, f"{name} in step {step}", coordinates
        self._words: dict[int, Tensor] = {}

    def __call__(self, index: int) -> Tensor:
        """16 uniform bits of each element as int32; independent of those of another `index`.

        The weight has index 0, and its tensors of state have 1, 2, ... One hash of 32 bits serves two.
        """
        word, half = divmod(index, 2)
        if word not in self._words:
            number = tensor_seed(self._seed, f"{self._source}, {word}") >> 1
            key = torch.full((), number, device=self._coordinates[-1].device)
            self._words[word] = uniform_bits(key, mix64(key), self._coordinates)
        return (self._words[word] >> (DROPPED * half)) & 0xFFFF


def round_to_bfloat16(values: Tensor, noise: Tensor) -> Tensor:
    """`values` as float32 numbers that a bfloat16 can hold; `noise`: 16 uniform bits of each, as int32.

    A bfloat16 is the upper half of a float32: the sum carries into it with the probability that the lower
    half stands for. What is already a bfloat16 stays as it is, and so does NaN: the NaN of a GPU has all
    bits set, and the sum would be -0.
    """
    wide = values.float()
    rounded = ((wide.view(torch.int32) + noise) & -(2**DROPPED)).view(torch.float32)
    return torch.where(wide.isnan(), wide, rounded)


def coordinates_of(weight: Tensor) -> list[Tensor]:
    """The places of this rank's elements in each dim of the whole `weight`; [0] for a scalar."""
    device = local_part(weight).device
    if not isinstance(weight, DTensor):
        return [torch.arange(size, device=device) for size in weight.shape or (1,)]
    coordinates = []
    for dim, size in enumerate(weight.shape):
        places = torch.arange(size).view([-1 if other == dim else 1 for other in range(weight.dim())])
        coordinates.append(cut(places, like=weight, dims=(dim,)).reshape(-1).to(device))
    return coordinates


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part, which shares its memory; a scalar as one row."""
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    return local if local.dim() else local.view(1)


def wide_dtype(weight: Tensor) -> torch.dtype:
    """The type in which `weight` is updated."""
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


@torch.no_grad()
def hold_bfloat16(weights: Iterable[Tensor]) -> None:
    """Round weights that are held in a wider type to the nearest bfloat16, as a cast would."""
    for weight in map(local_part, weights):
        weight.copy_(weight.to(torch.bfloat16))
