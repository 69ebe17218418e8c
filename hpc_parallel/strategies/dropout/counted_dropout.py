"""Dropout that is the same on every layout (Srivastava et al. 2014), by counter-based random numbers.

Whether an element is dropped depends only on the seed, the name of the layer, the index of the sample in the
training, and the element's coordinates in the sample. A hash of these numbers replaces the state of a
generator (Salmon et al. 2011). A step uses each sample once, so the index of the sample also tells the step.

The masks need no communication. An element gets the same mask when a block is recomputed for its backward
pass, and when a run continues on another layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hpc_parallel.models.attention import Positions
from hpc_parallel.models.drawn_weights import tensor_seed
from hpc_parallel.models.layered import LayeredModel, SampleIndices
from hpc_parallel.problems import ConfigError
from hpc_parallel.strategies.dropout.dropout_shapes import ELEMENTWISE, WholeShape, dropouts
from hpc_parallel.strategies.halo import Grid
from hpc_parallel.strategies.replace_forward import Forward, replace_forward


@dataclass(frozen=True)
class SamplePart:
    """The part of each sample that this device has, used if a layer's input is smaller than the whole.

    positions: the positions of a sequence on this rank. context: the number of ranks of the context axis.
    tensor: this rank on the tensor axis, and its degree. tiles: the tiles of an image.
    """

    positions: Positions = field(default_factory=Positions)
    context: int = 1
    tensor: tuple[int, int] = (0, 1)
    tiles: Grid | None = None

    def indices(self, x: Tensor, dim: int, shape: WholeShape) -> Tensor | None:
        """The indices of the elements of `x` in the whole `dim`; None if they are not known."""
        size, full_size = x.shape[dim], shape.sizes[dim - 1]
        if size == full_size:
            return torch.arange(size, device=x.device)
        if self.tiles is not None:  # checked first: the rows of a grey image look like positions
            first_map_dim = x.dim() - 2
            if dim < first_map_dim:
                return None
            height, width = shape.sizes[-2:]
            start, end = self.tiles.boxes((height, width))[self.tiles.rank][dim - first_map_dim]
            return torch.arange(start, end, device=x.device)
        if dim in shape.sequence_dims:
            sequence = self.positions(full_size // self.context, device=x.device)
            return sequence if size == len(sequence) else self._slice(sequence, size)
        return self._slice(torch.arange(full_size, device=x.device), size)

    def _slice(self, indices: Tensor, size: int) -> Tensor | None:
        """This rank's part of `indices`, if the tensor axis divides them into parts of `size`."""
        rank, degree = self.tensor
        return indices[rank * size : (rank + 1) * size] if size * degree == len(indices) else None


@dataclass(frozen=True)
class Counter:
    """What a dropout layer needs besides its input. key: 0-dim int64, of (seed, name of the layer)."""

    key: Tensor
    shape: WholeShape


def apply(
    model: LayeredModel,
    *,
    shapes: Mapping[str, WholeShape],
    part: SamplePart,
    seed: int,
    device: torch.device,
) -> LayeredModel:
    """Let every dropout of `model` (or a stage of it) draw by counters.

    shapes: the shapes of the inputs in the whole model, by the names of the dropouts. part: the part of each
    sample that this device has.
    """
    forward = partial(drop, model.sample_indices, part)
    counted = [(name, module) for name, module in dropouts(model) if name in shapes]
    for name, module in counted:
        key = torch.tensor(tensor_seed(seed, name) >> 1, device=device)
        module.counter = Counter(key, shapes[name])
        replace_forward(module, forward, technique="Counted")
        model.sample_indices.used = True
    return model


def drop(samples: SampleIndices, part: SamplePart, original: Forward, module: Any, x: Tensor) -> Tensor:
    """`x` [batch, ...] with elements (or channels of Dropout1d, 2d and 3d) set to zero in training mode."""
    if not module.training or module.p == 0:
        return x
    if isinstance(x, DTensor):
        local = drop(samples, part, original, module, x.to_local())
        return DTensor.from_local(
            local, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
        )
    dims = range(1, x.dim() if isinstance(module, ELEMENTWISE) else 2)
    coordinates = [_coordinates(x, dim, module=module, part=part) for dim in dims]
    kept = keeps(module.counter.key, samples.current().to(x.device), coordinates, rate=module.p)
    kept = kept.reshape(*kept.shape, *[1] * (x.dim() - kept.dim()))
    scale = 1 / (1 - module.p) if module.p < 1 else 0.0
    return torch.where(kept, x * scale, torch.zeros((), dtype=x.dtype, device=x.device))


def _coordinates(x: Tensor, dim: int, *, module: Any, part: SamplePart) -> Tensor:
    shape: WholeShape = module.counter.shape
    indices = part.indices(x, dim, shape)
    if indices is None or len(indices) != x.shape[dim]:
        raise ConfigError([
            f"{shape.name} gets {list(x.shape)[1:]} of {list(shape.sizes)} of each sample, and this layout "
            "does not say which. Set its probability to 0."
        ])  # fmt: skip
    return indices


def keeps(key: Tensor, samples: Tensor, coordinates: Sequence[Tensor], *, rate: float) -> Tensor:
    """Whether each element stays: bool [sample, *coordinates], true with probability 1 - `rate`.

    All tensors are int64. `key` has no dim; `samples` and each of `coordinates` have one dim.
    """
    threshold = min(round(rate * 2**32), 2**32 - 1) - 2**31
    return uniform_bits(key, mix64(mix64(samples) ^ key), coordinates) >= threshold


def uniform_bits(key: Tensor, rows: Tensor, coordinates: Sequence[Tensor]) -> Tensor:
    """32 uniform bits of each element, as int32 [*rows, *coordinates], from its coordinates and `key`.

    All tensors are int64: `rows` are hashes that contain `key`, which has no dim; each of `coordinates` has
    one dim.
    """
    for coordinate in coordinates[:-1]:
        rows = mix64(rows.unsqueeze(-1) ^ mix64(coordinate))
    columns = mix64(coordinates[-1] ^ mix64(key))
    return mix32(rows.unsqueeze(-1), columns)


def mix64(x: Tensor) -> Tensor:
    """SplitMix64's finaliser (Steele, Lea & Flood 2014) of int64 as 64 bits; arithmetic is modulo 2^64."""
    x = x + -0x61C8864680B583EB
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def mix32(rows: Tensor, columns: Tensor) -> Tensor:
    """32 uniform bits, as int32, of each pair of 64-bit hashes; the shapes broadcast.

    Applies lowbias32 (Wellons 2018, "Prospecting for hash functions") to the low halves. The high half of a
    row enters between its rounds, so that rows with the same low half have different bits.
    """
    x = rows.int() ^ columns.int()
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = x ^ (rows >> 32).int()
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -0x7B935975
    return x ^ ((x >> 16) & 0xFFFF)
