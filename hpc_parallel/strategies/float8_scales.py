"""The scales of products in float8: the range of the type over the largest absolute value of the numbers.

A scale is a power of two. Then a number is rounded to the same significant bits in every part of a batch,
although the parts have different largest values.

A scale is for one microbatch. Ranks that hold parts of a tensor exchange its largest values (`LayerSplits`),
so a layout rounds as one device with the same microbatches does. The largest values of weights that
`tensorwise` needs are the same in all microbatches: `WeightScales` finds them once a step, with one message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Linear

from hpc_parallel.models.drawn_weights import local_of
from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.strategies.forward_backward import ForwardBackward, InContext
from hpc_parallel.strategies.mesh import name_of
from hpc_parallel.strategies.ranges import marked
from hpc_parallel.torch_internals import largest_of_group

LARGEST = "float8_largest"  # of a layer: the largest value of its weight, which the layout may split
TINIEST = 1e-12  # a factor whose largest value is smaller is not scaled up to the full range
EXPONENT = 0x7F800000  # the exponent bits of a float32; with only these bits, a number is a power of two


class ScaleAxis(NamedTuple):
    """An axis whose ranks exchange largest values: the names of the axis and of its group."""

    name: str
    group: str

    @classmethod
    def of(cls, axis: DeviceMesh | None) -> tuple[ScaleAxis, ...]:
        return () if axis is None else (cls(name_of(axis), axis.get_group().group_name),)


class LayerSplits(NamedTuple):
    """The axes that split the rows (tokens), the inputs and the outputs of a layer."""

    rows: tuple[ScaleAxis, ...] = ()
    inputs: tuple[ScaleAxis, ...] = ()
    outputs: tuple[ScaleAxis, ...] = ()


class Factor(NamedTuple):
    """A matrix of a product, or this rank's part of it, that is rounded to `dtype`; `dim` as in `quantise`.

    With `dim`, a matrix of each group is rounded too ([group, rows, columns]).

    split: the axes that split the rows and the columns of the matrix. largest: the result of `largest_of` for
    the whole matrix, if it is known.
    """

    matrix: Tensor
    dtype: torch.dtype
    dim: int | None
    split: tuple[tuple[ScaleAxis, ...], tuple[ScaleAxis, ...]]
    largest: Tensor | None = None

    @property
    def over(self) -> tuple[ScaleAxis, ...]:
        """The axes that split what one scale is for, and whose ranks have other largest values."""
        if self.largest is not None:
            return ()
        return (*self.split[0], *self.split[1]) if self.dim is None else self.split[self.dim]


def quantise_all(*factors: Factor) -> list[tuple[Tensor, Tensor]]:
    """As `quantise`, with the scales of the whole matrices."""
    return [
        quantise(factor.matrix, factor.dtype, dim=factor.dim, largest=factor.largest)
        for factor in with_largest(*factors)
    ]


def with_largest(*factors: Factor) -> list[Factor]:
    """The factors with the largest values of the whole matrices: a message for each axis that splits some."""
    largest = [
        largest_of(factor.matrix, dim=factor.dim) if factor.largest is None else factor.largest
        for factor in factors
    ]
    for axis in dict.fromkeys(axis for factor in factors for axis in factor.over):
        places = [place for place, factor in enumerate(factors) if axis in factor.over]
        message = torch.cat([largest[place].flatten() for place in places])
        with marked(f"all_reduce {axis.name}"):
            message = largest_of_group(message, group=axis.group)
        for place, part in zip(
            places, message.split([largest[place].numel() for place in places]), strict=True
        ):
            largest[place] = part.view_as(largest[place])
    return [factor._replace(largest=whole) for factor, whole in zip(factors, largest, strict=True)]


def largest_of(x: Tensor, *, dim: int | None) -> Tensor:
    """The largest absolute value of `x` [rows, columns] over `dim`, in float32.

    dim: -1 gives a value for each row ([rows, 1]), -2 gives one for each column ([1, columns]), None gives
    one for all (no dims).
    """
    if torch.compiler.is_compiling():  # torch 2.13 names two maxima in bfloat16 alike in its C++ code
        x = x.float()
    return (x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)).float()


def quantise(
    x: Tensor, dtype: torch.dtype, *, dim: int | None, largest: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Round `x` [rows, columns] to float8 with a scale; returns the result and 1 / scale, in float32.

    dim: as in `largest_of`. largest: the result of `largest_of` for the whole matrix, if `x` is a part.

    A scale is the greatest power of two that brings no number beyond the range of `dtype`. If `x` is not
    finite, its products are not finite either.
    """
    if largest is None:
        largest = largest_of(x, dim=dim)
    scale = torch.finfo(dtype).max / largest.clamp(min=TINIEST)
    scale = (scale.view(torch.int32) & EXPONENT).view(torch.float32)
    return (x.float() * scale).to(dtype), scale.reciprocal()


class WeightScales(InContext):
    """The `inner` schedule; before a step, one message finds the largest values of all its float8 weights.

    axes: those that split weights: `tensor`, and the one over which fully_shard slices them.
    """

    def __init__(
        self, inner: ForwardBackward, *, layers: Sequence[Linear], axes: Sequence[DeviceMesh | None]
    ) -> None:
        super().__init__(inner, self._found)
        self._layers = layers
        self._axes = [axis for one in axes for axis in ScaleAxis.of(one)]

    @contextmanager
    def _found(self) -> Iterator[None]:
        """Let each layer know its value, until an update changes the weights."""
        try:
            for layer, largest in zip(self._layers, self._largest().unbind(), strict=True):
                setattr(layer, LARGEST, largest)
            yield
        finally:
            for layer in self._layers:
                setattr(layer, LARGEST, None)

    @torch.no_grad()
    def _largest(self) -> Tensor:
        """The values of the layers' weights as the products have them, in bfloat16 or float64."""
        weights = [layer.weight for layer in self._layers]
        parts = [local_of(weight) for weight in weights]
        values = [
            largest_of(part, dim=None) if part.numel() else torch.zeros((), device=part.device)
            for part in parts
        ]
        largest = torch.stack(values)
        for axis in self._axes:
            with marked(f"all_reduce {axis.name}"):
                largest = largest_of_group(largest, group=axis.group)
        return largest if weights[0].dtype == torch.float64 else largest.bfloat16().float()


def scaled_layers(parts: Sequence[LayeredModel]) -> list[Linear]:
    """The layers of `parts` with one scale for their weight."""
    modules = (module for part in parts for module in part.modules())
    return [module for module in modules if isinstance(module, Linear) and hasattr(module, LARGEST)]
