"""Products of linear layers in float8, with scales from the numbers themselves (Micikevicius et al. 2022).

A linear layer has three products: its output, the gradient by its input and the gradient by its weight. Both
factors of each product are scaled, so that the largest absolute value comes near the largest number of the
type. Then they are rounded to float8: e4m3 with 4 bits of precision, or e5m2 with 3 bits and more range.
`tensorwise` has one scale for a tensor, `rowwise` one for each row of the left and each column of the right
factor. The sums are float32, and the results are bfloat16.

The recipes are torchao's, but here the scales of `tensorwise` are powers of two too (`float8_scales.py`).

Experts multiply by rows: the output and the gradient of the input, whose scales are for one token. The sum of
the gradient by a weight runs over tokens, and an expert has tokens of several devices' microbatches. A scale
for them would depend on the layout, so this gradient is not in float8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn import Linear
from torch.nn.functional import linear

from hpc_parallel.layout.layout import Layout
from hpc_parallel.layout.step_facts import ALIGNED, BY_ROWS, EXPERTS_BY_ROWS, MULTIPLES, OFF, is_cut
from hpc_parallel.models.experts import Experts, SharedExperts, weight_gradients_of_groups
from hpc_parallel.models.layered import Column, LayeredModel
from hpc_parallel.problems import ConfigError, Problem, Problems
from hpc_parallel.strategies.float8_scales import (
    LARGEST,
    Factor,
    LayerSplits,
    ScaleAxis,
    quantise,
    quantise_all,
    with_largest,
)
from hpc_parallel.strategies.replace_forward import Forward, replace_forward
from hpc_parallel.strategies.tensor.tensor_roles import roles_of
from hpc_parallel.torch_internals import scaled_product, scaled_product_of_groups

KEY = "training.fp8"
INPUT, GRADIENT = torch.float8_e4m3fn, {True: torch.float8_e4m3fn, False: torch.float8_e5m2}
CAPABILITY = (8, 9)  # the first GPUs with float8
Gradients = tuple[Tensor | None, Tensor | None]  # by the input and by the weight


def apply(
    model: LayeredModel,
    *,
    recipe: str,
    device: torch.device,
    context: DeviceMesh | None = None,
    tensor: DeviceMesh | None = None,
    apart: bool = False,
) -> LayeredModel:
    """Let the linear layers and experts in the blocks of `model` multiply in float8, as `recipe` says.

    Stem and head keep bfloat16. So do layers that `layers_of` and `experts_of` leave out. `recipe`:
    `training.fp8`. `context`, `tensor`: the axes that have split sequences and layers. `apart`: the gradients
    of weights are computed after those of the inputs, as zero-bubble schedules do.
    Raises ConfigError if `device` can't multiply float8.
    """
    if recipe == OFF:
        return model
    experts = list(experts_of(model))
    if device.type == "cuda":
        problem = device_problem(recipe, device) or (groups_problem(recipe, device) if experts else None)
        if problem is not None:
            raise ConfigError([problem])
    by_rows, rows, over = recipe == BY_ROWS, ScaleAxis.of(context), ScaleAxis.of(tensor)
    forward = partial(multiply, by_rows=by_rows, context=rows, tensor=over, apart=apart)
    for layer in list(layers_of(model)):
        replace_forward(layer, forward, technique="Float8")
        if not by_rows:
            setattr(layer, LARGEST, None)
    for part in experts:
        product = product_of_groups if isinstance(part, Experts) else partial(shared_product, by_rows=by_rows)
        part.widen = partial(product, splits=LayerSplits(rows, outputs=over), apart=apart)
        part.narrow = partial(product, splits=LayerSplits(rows, inputs=over), apart=apart)
    return model


def layers_of(model: LayeredModel) -> Iterator[Linear]:
    """The linear layers of the blocks, if the sizes of the layer are multiples of 16.

    Routers, which are beside experts in a module, are left out. So is a subclass with a forward pass of its
    own.
    """
    for block in model.distinct_blocks:
        routers = {
            child
            for parent in block.modules()
            if any(isinstance(child, Experts) for child in parent.children())
            for child in parent.children()
        }
        for module in block.modules():
            if not isinstance(module, Linear) or type(module).forward is not Linear.forward:
                continue
            if module not in routers and module.in_features % ALIGNED == module.out_features % ALIGNED == 0:
                yield module


def experts_of(model: LayeredModel) -> Iterator[Experts | SharedExperts]:
    """The experts of the blocks whose sizes are multiples of 16."""
    modules = (module for block in model.distinct_blocks for module in block.modules())
    experts = (module for module in modules if isinstance(module, Experts | SharedExperts))
    return (part for part in experts if not any(size % ALIGNED for size in part.gate.shape[-2:]))


def find_problems(
    model: LayeredModel, *, recipe: str, layout: Layout, sample_shape: tuple[int, ...] | None
) -> Problems:
    """Returns why the blocks of the whole `model` can't multiply in float8 on `layout`."""
    if recipe == OFF:
        return
    layers, experts = set(layers_of(model)), list(experts_of(model))
    if recipe != BY_ROWS and any(isinstance(module, Experts) for module in model.modules()):
        yield Problem(KEY, recipe, EXPERTS_BY_ROWS, (BY_ROWS, OFF))
    rules = []
    if not layers and not experts:
        rules.append(f"has no effect: no block has a linear layer whose sizes are {MULTIPLES}")
    if sample_shape and is_cut(sample_shape[0], layout.context):
        rules.append(
            f"needs parts of sequences whose lengths are {MULTIPLES}: of {sample_shape[0]} positions "
            f"strategy.context = {layout.context} leaves {sample_shape[0] // layout.context}"
        )
    if layout.tensor > 1:
        roles = roles_of(model)
        named = [(name, part) for name, part in model.named_modules() if part in layers]
        rules += [rule for name, part in named if (rule := _role_rule(name, part, roles, layout.tensor))][:1]
        widths = {part.gate.shape[-2] for part in experts}
        rules += [_cut("experts", size, layout.tensor) for size in widths if is_cut(size, layout.tensor)]
    yield from (Problem(KEY, recipe, rule, (OFF,)) for rule in rules)


def _role_rule(name: str, layer: Linear, roles: Mapping[str, str | Column], degree: int) -> str | None:
    """Why a layer with this role can't multiply in float8 if `degree` devices split it."""
    sizes = {"column": layer.out_features, "row": layer.in_features}
    role = roles.get(name)
    if role not in sizes:
        return f"is proven with strategy.tensor for the roles column and row only, and {name} has {role}"
    return _cut(name, sizes[role], degree) if is_cut(sizes[role], degree) else None


def _cut(name: str, size: int, degree: int) -> str:
    return (
        f"needs parts of layers whose sizes are {MULTIPLES}: of {size} numbers of {name} "
        f"strategy.tensor = {degree} leaves {size // degree}"
    )


def device_problem(recipe: str, device: torch.device) -> Problem | None:
    """Why a GPU can't multiply the two types of float8 that are used."""
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability >= CAPABILITY:
        return None
    oldest, current = (".".join(map(str, version)) for version in (CAPABILITY, capability))
    rule = f"needs an NVIDIA GPU of compute capability {oldest} or newer, and {name} has {current}"
    return Problem(KEY, recipe, rule, (OFF,))


def groups_problem(recipe: str, device: torch.device) -> Problem | None:
    """Why a GPU can't multiply groups of rows: torch has a kernel for some GPUs, which is not public.

    A small product is compared with the same on a CPU: groups of uneven sizes, one without rows.
    """
    numbers = torch.Generator().manual_seed(0)
    (rows, of_rows), (weights, of_weights) = (
        quantise(torch.randn(shape, generator=numbers), INPUT, dim=-1) for shape in ((40, 64), (3, 32, 64))
    )
    ends = torch.tensor([21, 21, 40], dtype=torch.int32)
    factors = rows, weights.mT, ends, of_rows, of_weights.mT
    wanted = scaled_product_of_groups(*factors, False).float()
    try:
        found = scaled_product_of_groups(*(factor.to(device) for factor in factors), False).float().cpu()
        rule = "multiplies groups of rows wrongly here"
    except (RuntimeError, NotImplementedError) as error:
        found, rule = torch.full_like(wanted, torch.nan), f"has no product of groups here: {error}"
    if float((found - wanted).abs().max() / wanted.abs().max()) <= 2.0**-8:  # bfloat16's rounding
        return None
    return Problem(KEY, recipe, f"{rule} ({torch.cuda.get_device_name(device)})", (OFF,))


def multiply(
    original: Forward,
    layer: Linear,
    x: Tensor,
    *,
    by_rows: bool,
    context: tuple[ScaleAxis, ...] = (),
    tensor: tuple[ScaleAxis, ...] = (),
    apart: bool = False,
) -> Tensor:
    """The output of `layer` for `x` [..., in]: in bfloat16, as under autocast, or in float64 if `x` is.

    If the number of rows is not a multiple of 16, one of the products can't be in float8, so the layer keeps
    bfloat16. The arguments after `x` are those of `apply`.
    """
    if (rows := x.shape[:-1].numel()) == 0 or rows % ALIGNED:
        return original(layer, x)
    weight = layer.weight
    part = partial(product, by_rows=by_rows, largest=getattr(layer, LARGEST, None), apart=apart)
    if not isinstance(weight, DTensor):
        output = part(x, weight, splits=LayerSplits(rows=context))
    else:
        assert isinstance(x, DTensor)
        columns = weight.placements == (Shard(0),)  # of the output; otherwise the inputs are split
        split = LayerSplits(context, outputs=tensor) if columns else LayerSplits(context, inputs=tensor)
        local = x.to_local(grad_placements=[Partial()]) if columns else x.to_local()
        output = part(local, weight.to_local(), splits=split)
        placement = Shard(output.dim() - 1) if columns else Partial()
        output = DTensor.from_local(output, weight.device_mesh, [placement], run_check=False)
    return output if layer.bias is None else output + layer.bias.to(output.dtype)


def shared_product(x: Tensor, weight: Tensor, **options: Any) -> Tensor:
    """As `multiply`, for this rank's part of a weight [out, in] of experts that every token uses."""
    if (rows := x.shape[:-1].numel()) == 0 or rows % ALIGNED:
        return linear(x, weight)
    return product(x, weight, **options)


def product_of_groups(
    rows: Tensor, weights: Tensor, ends: Tensor, *, splits: LayerSplits, apart: bool = False
) -> Tensor:
    """As `models.experts.grouped_product`, by rows in float8, in bfloat16, or in float64 if `rows` is."""
    dtype = torch.float64 if rows.dtype == torch.float64 else torch.bfloat16
    return multiplied(ProductOfGroups, rows.to(dtype), weights.to(dtype), ends, splits, apart=apart)


def product(
    x: Tensor,
    weight: Tensor,
    *,
    by_rows: bool,
    splits: LayerSplits,
    largest: Tensor | None = None,
    apart: bool = False,
) -> Tensor:
    """This rank's `x` [..., in] times the transpose of its `weight` [out, in].

    largest: the largest absolute value of the whole weight, if it is known.
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.bfloat16
    flat, weight = x.reshape(-1, x.shape[-1]).to(dtype), weight.to(dtype)
    inner = -1 if by_rows else None
    factors = with_largest(
        Factor(flat.detach(), INPUT, inner, (splits.rows, splits.inputs)),
        Factor(weight.detach(), INPUT, inner, (splits.outputs, splits.inputs), largest),
    )
    values = [factor.largest for factor in factors]
    output = multiplied(Product, flat, weight, *values, inner, splits, apart=apart)
    return output.reshape(*x.shape[:-1], len(weight))


def multiplied(
    kind: type[Product | ProductOfGroups], x: Tensor, weight: Tensor, *others: Any, apart: bool
) -> Tensor:
    """`kind.apply` of the other arguments; if `apart`, a node of its own has the gradient of `weight`.

    A pass of autograd that needs one gradient of a Function lets it compute all of them.
    """
    if not (apart and x.requires_grad and weight.requires_grad):
        return kind.apply(x, weight, *others)  # type: ignore[no-any-return]
    output: Tensor = kind.apply(x, weight.detach(), *others)
    zeros = WeightGradient.apply(kind, output.detach(), x.detach(), weight, *others)
    return Joined.apply(output, zeros)  # type: ignore[no-any-return]


def keep(ctx: Any, *arguments: Any) -> None:
    """Keep the arguments of a product for its gradients."""
    ctx.save_for_backward(*[one for one in arguments if isinstance(one, Tensor)])
    ctx.others = [one for one in arguments if not isinstance(one, Tensor)]


class WeightGradient(torch.autograd.Function):
    """Zeros like `output`, without their memory. Their gradient gives that of the weight in this product."""

    @staticmethod
    def forward(ctx: Any, kind: type[Product | ProductOfGroups], output: Tensor, *arguments: Any) -> Tensor:
        ctx.kind = kind
        keep(ctx, *arguments)
        return output.new_zeros(()).expand_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        _, by_weight = ctx.kind.gradients(ctx, gradient, by_x=False, by_weight=True)
        return None, None, None, by_weight, *[None for _ in ctx.needs_input_grad[4:]]


class Joined(torch.autograd.Function):
    """`output`. `zeros` gets the same gradient."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, zeros: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient


class Product(torch.autograd.Function):
    """x [rows, in] times the transpose of `weight` [out, in], both bfloat16 or float64, and its gradients.

    It keeps its arguments for the backward pass, not their float8 copies. The weight exists anyway, and
    fully_shard may free it meanwhile. Layers with the same `x` share it. Compiled code detects that the
    backward pass rounds the same numbers again. It keeps them or their float8 copies, whichever are smaller.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        largest_x: Tensor,
        largest_weight: Tensor,
        dim: int | None,
        splits: LayerSplits,
    ) -> Tensor:
        """largest_x, largest_weight: as in `Factor`."""
        keep(ctx, x, weight, largest_x, largest_weight, dim, splits)
        x8, of_x = quantise(x, INPUT, dim=dim, largest=largest_x)
        weight8, of_weight = quantise(weight, INPUT, dim=dim, largest=largest_weight)
        return scaled_product(x8, weight8.t(), scales=(of_x, of_weight.t()), dtype=x.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        by_x, by_weight, *others = ctx.needs_input_grad
        return *Product.gradients(ctx, gradient, by_x=by_x, by_weight=by_weight), *[None for _ in others]

    @staticmethod
    def gradients(ctx: Any, gradient: Tensor, *, by_x: bool, by_weight: bool) -> Gradients:
        x, weight, *largest = ctx.saved_tensors
        inner, (rows, inputs, outputs) = ctx.others
        by_rows, columns = (False, None) if inner is None else (True, -2)
        # With a scale for a tensor, the values are those of the forward pass.
        largest_x, largest_weight = (None, None) if by_rows else largest
        along_rows = Factor(gradient, GRADIENT[by_rows], inner, (rows, outputs))
        factors = {}
        if by_x:
            factors["weight"] = Factor(weight, INPUT, columns, (outputs, inputs), largest_weight)
            factors["rows"] = along_rows
        if by_weight:
            factors["x"] = Factor(x, INPUT, columns, (rows, inputs), largest_x)
            # The rows of the gradient's transpose have their own scales.
            factors["columns" if by_rows else "rows"] = along_rows._replace(dim=columns)
        rounded = dict(zip(factors, quantise_all(*factors.values()), strict=True))
        scaled, of_x, of_weight = partial(scaled_product, dtype=x.dtype, fast=False), None, None
        if by_x:
            (gradient8, of_gradient), (weight8, scale) = rounded["rows"], rounded["weight"]
            of_x = scaled(gradient8, weight8, scales=(of_gradient, scale))
        if by_weight:
            (gradient8, of_gradient), (x8, scale) = rounded["columns" if by_rows else "rows"], rounded["x"]
            of_weight = scaled(gradient8.t(), x8, scales=(of_gradient.t(), scale))
        return of_x, of_weight


class ProductOfGroups(torch.autograd.Function):
    """Each group of `rows` [row, in] times the transpose of its matrix of `weights` [group, out, in].

    ends: as in `scaled_product_of_groups`. The gradient of `weights` is not in float8.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, ends: Tensor, splits: LayerSplits) -> Tensor:
        keep(ctx, rows, weights, ends, splits)
        (rows8, of_rows), (weights8, of_weights) = quantise_all(
            Factor(rows, INPUT, -1, ((), splits.inputs)),
            Factor(weights, INPUT, -1, (splits.outputs, splits.inputs)),
        )
        scales, exact = (of_rows, of_weights.mT), rows.dtype == torch.float64
        return scaled_product_of_groups(rows8, weights8.mT, ends, *scales, exact)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        by_x, by_weight, *_ = ctx.needs_input_grad
        return *ProductOfGroups.gradients(ctx, gradient, by_x=by_x, by_weight=by_weight), None, None

    @staticmethod
    def gradients(ctx: Any, gradient: Tensor, *, by_x: bool, by_weight: bool) -> Gradients:
        (rows, weights, ends), (splits,) = ctx.saved_tensors, ctx.others
        gradient = gradient.contiguous()
        of_rows = None
        if by_x:
            (weights8, of_weights), (gradient8, of_gradient) = quantise_all(
                Factor(weights, INPUT, -2, (splits.outputs, splits.inputs)),
                Factor(gradient, GRADIENT[True], -1, ((), splits.outputs)),
            )
            scales, exact = (of_gradient, of_weights), rows.dtype == torch.float64
            of_rows = scaled_product_of_groups(gradient8, weights8, ends, *scales, exact)
        return of_rows, weight_gradients_of_groups(rows, gradient, ends) if by_weight else None
