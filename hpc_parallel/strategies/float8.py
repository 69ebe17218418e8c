"""Products of linear layers in float8, with scales from the numbers themselves (Micikevicius et al. 2022).

A linear layer has three products: its output, the gradient by its input and the gradient by its weight. Both
factors of each product are scaled, so that the largest absolute value comes near the largest number of the
type. Then they are rounded to float8: e4m3 with 4 bits of precision, or e5m2 with 3 bits and more range.
`tensorwise` has one scale for a tensor, `rowwise` one for each row of the left and each column of the right
factor. The sums are float32, and the results are bfloat16.

The recipes are torchao's, but here the scales of `tensorwise` are powers of two too. Then a number is rounded
to the same significant bits in every part of a batch, although the parts have different largest values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear

from hpc_parallel.layout.step_facts import OFF
from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.problems import ConfigError, Problem, Problems
from hpc_parallel.strategies.replace_forward import Forward, replace_forward
from hpc_parallel.torch_internals import scaled_product

KEY = "training.fp8"
INPUT, GRADIENT = torch.float8_e4m3fn, {True: torch.float8_e4m3fn, False: torch.float8_e5m2}
ALIGNED = 16  # cuBLAS needs every dim of a product to be a multiple of it
CAPABILITY = (8, 9)  # the first GPUs with float8
TINIEST = 1e-12  # a factor whose largest value is smaller is not scaled up to the full range
EXPONENT = 0x7F800000  # the exponent bits of a float32; with only these bits, a number is a power of two


def apply(model: LayeredModel, *, recipe: str, device: torch.device) -> LayeredModel:
    """Let the linear layers in the blocks of `model` multiply in float8, as `recipe` says (`training.fp8`).

    Stem and head keep bfloat16. So do layers that `layers_of` leaves out.
    Raises ConfigError if `device` can't multiply float8.
    """
    if recipe == OFF:
        return model
    if device.type == "cuda" and (problem := device_problem(recipe, device)) is not None:
        raise ConfigError([problem])
    for layer in layers_of(model):
        replace_forward(layer, RECIPES[recipe], technique="Float8")
    return model


def layers_of(model: LayeredModel) -> Iterator[Linear]:
    """The linear layers of the blocks, if the sizes of the layer are multiples of 16.

    A subclass with a forward pass of its own is left out.
    """
    for block in model.distinct_blocks:
        for module in block.modules():
            if not isinstance(module, Linear) or type(module).forward is not Linear.forward:
                continue
            if module.in_features % ALIGNED == module.out_features % ALIGNED == 0:
                yield module


def find_problems(model: LayeredModel, *, recipe: str) -> Problems:
    if recipe != OFF and next(layers_of(model), None) is None:
        rule = f"has no effect: no block has a linear layer whose sizes are multiples of {ALIGNED}"
        yield Problem(KEY, recipe, rule, (OFF,))


def device_problem(recipe: str, device: torch.device) -> Problem | None:
    """Why a GPU can't multiply the two types of float8 that are used."""
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability >= CAPABILITY:
        return None
    oldest, current = (".".join(map(str, version)) for version in (CAPABILITY, capability))
    rule = f"needs an NVIDIA GPU of compute capability {oldest} or newer, and {name} has {current}"
    return Problem(KEY, recipe, rule, (OFF,))


def tensorwise(original: Forward, layer: Linear, x: Tensor) -> Tensor:
    return multiply(original, layer, x, by_rows=False)


def rowwise(original: Forward, layer: Linear, x: Tensor) -> Tensor:
    return multiply(original, layer, x, by_rows=True)


RECIPES: dict[str, Callable[..., Tensor]] = {"tensorwise": tensorwise, "rowwise": rowwise}


def multiply(original: Forward, layer: Linear, x: Tensor, *, by_rows: bool) -> Tensor:
    """The output of `layer` for `x` [..., in]: in bfloat16, as under autocast.

    If the number of rows is not a multiple of 16, one of the products can't be in float8, so the layer keeps
    bfloat16.
    """
    rows = x.shape[:-1].numel()
    if rows == 0 or rows % ALIGNED:
        return original(layer, x)
    flat = x.reshape(rows, x.shape[-1]).to(torch.bfloat16)
    output: Tensor = Product.apply(flat, layer.weight.to(torch.bfloat16), by_rows)
    output = output.reshape(*x.shape[:-1], layer.out_features)
    return output if layer.bias is None else output + layer.bias.to(output.dtype)


class Product(torch.autograd.Function):
    """x [rows, in] times the transpose of `weight` [out, in], both bfloat16, and its gradients.

    It keeps its arguments for the backward pass, not their float8 copies. The weight exists anyway, and
    fully_shard may free it meanwhile. Layers with the same `x` share it. Compiled code detects that the
    backward pass rounds the same numbers again. It keeps them or their float8 copies, whichever are smaller.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, by_rows: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.by_rows = by_rows
        inner = -1 if by_rows else None
        (x8, of_x), (weight8, of_weight) = (quantise(factor, INPUT, dim=inner) for factor in (x, weight))
        return scaled_product(x8, weight8.t(), scales=(of_x, of_weight.t()), fast=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        by_rows: bool = ctx.by_rows
        columns = 0 if by_rows else None
        weight8, of_weight = quantise(weight, INPUT, dim=columns)
        x8, of_x = quantise(x, INPUT, dim=columns)
        gradient8, of_gradient = quantise(gradient, GRADIENT[by_rows], dim=-1 if by_rows else None)
        by_x = scaled_product(gradient8, weight8, scales=(of_gradient, of_weight), fast=False)
        if by_rows:  # the rows of the gradient's transpose have their own scales
            gradient8, of_gradient = quantise(gradient, GRADIENT[by_rows], dim=columns)
        by_weight = scaled_product(gradient8.t(), x8, scales=(of_gradient.t(), of_x), fast=False)
        return by_x, by_weight, None


def quantise(x: Tensor, dtype: torch.dtype, *, dim: int | None) -> tuple[Tensor, Tensor]:
    """Round `x` [rows, columns] to float8 with a scale; returns the result and 1 / scale, in float32.

    dim: the dim over which the largest absolute value is taken. -1 gives a scale for each row ([rows, 1]), 0
    gives one for each column ([1, columns]), None gives one for all (no dims).

    A scale is the greatest power of two that brings no number beyond the range of `dtype`. If `x` is not
    finite, its products are not finite either.
    """
    largest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = torch.finfo(dtype).max / largest.float().clamp(min=TINIEST)
    scale = (scale.view(torch.int32) & EXPONENT).view(torch.float32)
    return (x.float() * scale).to(dtype), scale.reciprocal()
