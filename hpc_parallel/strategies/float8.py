"""Products of linear layers in float8, with scales from the numbers themselves (Micikevicius et al. 2022).

A linear layer has three products: its output, the gradient by its input and the gradient by its weight. Both
factors of each product are scaled, so that the largest absolute value comes near the largest number of the
type. Then they are rounded to float8: e4m3 with 4 bits of precision, or e5m2 with 3 bits and more range.
`tensorwise` has one scale for a tensor, `rowwise` one for each row of the left and each column of the right
factor. The sums are float32, and the results are bfloat16.

The recipes are torchao's, but here the scales of `tensorwise` are powers of two too. Then a number is rounded
to the same significant bits in every part of a batch, although the parts have different largest values.

A scale is for one microbatch. Ranks that hold parts of a tensor exchange its largest values (`LayerSplits`),
so a layout rounds as one device with the same microbatches does. The largest values of weights that
`tensorwise` needs are the same in all microbatches: `WeightScales` finds them once a step, with one message.

Experts multiply by rows: the output and the gradient of the input, whose scales are for one token. The sum of
the gradient by a weight runs over tokens, and an expert has tokens of several devices' microbatches. A scale
for them would depend on the layout, so this gradient is not in float8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

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
from hpc_parallel.strategies.forward_backward import ForwardBackward
from hpc_parallel.strategies.mesh import name_of
from hpc_parallel.strategies.ranges import marked
from hpc_parallel.strategies.replace_forward import Forward, replace_forward
from hpc_parallel.strategies.tensor.tensor_roles import roles_of
from hpc_parallel.torch_internals import largest_of_group, scaled_product, scaled_product_of_groups

KEY = "training.fp8"
INPUT, GRADIENT = torch.float8_e4m3fn, {True: torch.float8_e4m3fn, False: torch.float8_e5m2}
LARGEST = "float8_largest"  # of a layer: the largest value of its weight, which the layout may split
CAPABILITY = (8, 9)  # the first GPUs with float8
TINIEST = 1e-12  # a factor whose largest value is smaller is not scaled up to the full range
ROUNDING_OF_HALF = 2.0**-8  # of a bfloat16
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
    for block in model.distinct_blocks:
        for module in block.modules():
            if not isinstance(module, Experts | SharedExperts):
                continue
            if not any(size % ALIGNED for size in module.gate.shape[-2:]):
                yield module


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
    difference = float((found - wanted).abs().max() / wanted.abs().max())
    if difference <= ROUNDING_OF_HALF:
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
    rows = x.shape[:-1].numel()
    if rows == 0 or rows % ALIGNED:
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


def shared_product(
    x: Tensor, weight: Tensor, *, by_rows: bool, splits: LayerSplits, apart: bool = False
) -> Tensor:
    """As `multiply`, for this rank's part of a weight [out, in] of experts that every token uses."""
    if (rows := x.shape[:-1].numel()) == 0 or rows % ALIGNED:
        return linear(x, weight)
    return product(x, weight, by_rows=by_rows, splits=splits, apart=apart)


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
    flat = x.reshape(-1, x.shape[-1]).to(dtype)
    output = multiplied(Product, flat, weight.to(dtype), by_rows, splits, largest, apart=apart)
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


class WeightGradient(torch.autograd.Function):
    """Zeros like `output`, without their memory. Their gradient gives that of `weight` in this product."""

    @staticmethod
    def forward(
        ctx: Any,
        kind: type[Product | ProductOfGroups],
        output: Tensor,
        x: Tensor,
        weight: Tensor,
        *others: Any,
    ) -> Tensor:
        ctx.kind = kind
        kind.keep(ctx, x, weight, *others)
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
        by_rows: bool,
        splits: LayerSplits,
        largest: Tensor | None = None,
    ) -> Tensor:
        inner = -1 if by_rows else None
        factors = with_largest(
            Factor(x, INPUT, inner, (splits.rows, splits.inputs)),
            Factor(weight, INPUT, inner, (splits.outputs, splits.inputs), largest),
        )
        Product.keep(ctx, x, weight, by_rows, splits, *reversed([factor.largest for factor in factors]))
        (x8, of_x), (weight8, of_weight) = quantise_all(*factors)
        return scaled_product(x8, weight8.t(), scales=(of_x, of_weight.t()), dtype=x.dtype, fast=True)

    @staticmethod
    def keep(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        by_rows: bool,
        splits: LayerSplits,
        largest: Tensor | None = None,
        largest_of_x: Tensor | None = None,
    ) -> None:
        ctx.by_rows, ctx.splits = by_rows, splits
        # With a scale for a tensor, the backward pass needs the same values.
        known = () if by_rows or largest_of_x is None else (largest_of_x, largest)
        ctx.save_for_backward(x, weight, *known)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        by_x, by_weight, *_ = ctx.needs_input_grad
        return *Product.gradients(ctx, gradient, by_x=by_x, by_weight=by_weight), None, None, None

    @staticmethod
    def gradients(
        ctx: Any, gradient: Tensor, *, by_x: bool, by_weight: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        x, weight, *known = ctx.saved_tensors
        largest_x, largest_weight = known or (None, None)
        by_rows: bool = ctx.by_rows
        splits: LayerSplits = ctx.splits
        inner, columns = (-1, -2) if by_rows else (None, None)
        along_rows = Factor(gradient, GRADIENT[by_rows], inner, (splits.rows, splits.outputs))
        factors = {}
        if by_x:
            factors["weight"] = Factor(
                weight, INPUT, columns, (splits.outputs, splits.inputs), largest_weight
            )
            factors["rows"] = along_rows
        if by_weight:
            factors["x"] = Factor(x, INPUT, columns, (splits.rows, splits.inputs), largest_x)
            # The rows of the gradient's transpose have their own scales.
            factors["columns" if by_rows else "rows"] = along_rows._replace(dim=columns)
        rounded = dict(zip(factors, quantise_all(*factors.values()), strict=True))
        of_x = of_weight = None
        if by_x:
            (gradient8, of_gradient), (weight8, scale) = rounded["rows"], rounded["weight"]
            scales = of_gradient, scale
            of_x = scaled_product(gradient8, weight8, scales=scales, dtype=x.dtype, fast=False)
        if by_weight:
            (gradient8, of_gradient), (x8, scale) = rounded["columns" if by_rows else "rows"], rounded["x"]
            scales = of_gradient.t(), scale
            of_weight = scaled_product(gradient8.t(), x8, scales=scales, dtype=x.dtype, fast=False)
        return of_x, of_weight


class ProductOfGroups(torch.autograd.Function):
    """Each group of `rows` [row, in] times the transpose of its matrix of `weights` [group, out, in].

    ends: as in `scaled_product_of_groups`. The gradient of `weights` is not in float8.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, ends: Tensor, splits: LayerSplits) -> Tensor:
        ProductOfGroups.keep(ctx, rows, weights, ends, splits)
        (rows8, of_rows), (weights8, of_weights) = quantise_all(
            Factor(rows, INPUT, -1, ((), splits.inputs)),
            Factor(weights, INPUT, -1, (splits.outputs, splits.inputs)),
        )
        scales, exact = (of_rows, of_weights.mT), rows.dtype == torch.float64
        output: Tensor = scaled_product_of_groups(rows8, weights8.mT, ends, *scales, exact)
        return output

    @staticmethod
    def keep(ctx: Any, rows: Tensor, weights: Tensor, ends: Tensor, splits: LayerSplits) -> None:
        ctx.save_for_backward(rows, weights, ends)
        ctx.splits = splits

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        by_x, by_weight, *_ = ctx.needs_input_grad
        return *ProductOfGroups.gradients(ctx, gradient, by_x=by_x, by_weight=by_weight), None, None

    @staticmethod
    def gradients(
        ctx: Any, gradient: Tensor, *, by_x: bool, by_weight: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        rows, weights, ends = ctx.saved_tensors
        splits: LayerSplits = ctx.splits
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


class WeightScales:
    """The `inner` schedule; before a step, one message finds the largest values of all its float8 weights.

    axes: those that split weights: `tensor`, and the one over which fully_shard slices them.
    """

    def __init__(
        self, inner: ForwardBackward, *, layers: Sequence[Linear], axes: Sequence[DeviceMesh | None]
    ) -> None:
        self._inner, self._layers = inner, layers
        self._axes = [axis for one in axes for axis in ScaleAxis.of(one)]
        self.copies = inner.copies

    def train(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with self._found():
            return self._inner.train(inputs, targets)

    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with self._found():
            return self._inner.evaluate(inputs, targets)

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
        parts = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights]
        largest = torch.stack(
            [
                largest_of(part, dim=None) if part.numel() else torch.zeros((), device=part.device)
                for part in parts
            ]
        )
        for axis in self._axes:
            with marked(f"all_reduce {axis.name}"):
                largest = largest_of_group(largest, group=axis.group)
        return largest if weights[0].dtype == torch.float64 else largest.bfloat16().float()


def scaled_layers(parts: Sequence[LayeredModel]) -> list[Linear]:
    """The layers of `parts` with one scale for their weight."""
    modules = (module for part in parts for module in part.modules())
    return [module for module in modules if isinstance(module, Linear) and hasattr(module, LARGEST)]
