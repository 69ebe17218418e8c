"""Check each axis of a layout: what it declares in `layout/axes.py`, and whether sizes fit its degree.

The rules of a pipeline are in `pipeline_checks.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hpc_parallel.config.checks import pipeline_checks
from hpc_parallel.config.checks.key_checks import sizes_are_legal
from hpc_parallel.config.checks.suggestions import multiples_near, with_degree_near, without_axis
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.layout.axes import DECLARED, Axis
from hpc_parallel.layout.counts import (
    DENSE,
    KEYS,
    class_path,
    count,
    halvings,
    is_convnet,
    reads,
    sequence_length,
)
from hpc_parallel.layout.layout import SPMD, Layout, divisors, tile_grid
from hpc_parallel.layout.model_data_schema import ConvNetConfig, MoeTransformerConfig
from hpc_parallel.layout.schedules import too_old
from hpc_parallel.problems import Problem, Problems


def find_problems(config: RunConfig, layout: Layout) -> Problems:
    for axis in DECLARED:
        degree = layout.degrees[axis.name]
        declared = list(_declared(axis, degree, config=config, layout=layout)) if degree > 1 else []
        yield from declared
        if not declared and axis.name in SIZE_CHECKS:
            yield from SIZE_CHECKS[axis.name](config, layout)


def _declared(axis: Axis, degree: int, *, config: RunConfig, layout: Layout) -> Problems:
    kind = reads(config.model)
    if axis.reads is not None and kind is not None and kind != axis.reads:
        rule = f"splits {axis.reads}, and the model reads {kind}"
        yield without_axis(axis.name, rule, config=config, layout=layout)
        return
    for other, reason in axis.apart.items():
        if layout.degrees[other] > 1:
            rule = f"can't be combined with strategy.{axis.name} = {degree}: {reason}"
            yield without_axis(other, rule, config=config, layout=layout)
    for conflict in axis.conflicts:
        if _value_at(config, conflict.key) == conflict.value:
            rule = f"can't be combined with strategy.{axis.name} = {degree}: {conflict.reason}"
            # A group is chosen by its own name: task=infer has other keys than task=generate.
            yield Problem(conflict.key.removesuffix(".name"), conflict.value, rule, conflict.legal)


def _value_at(config: RunConfig, key: str) -> Any:
    """The value of a dotted key; None if a table of the user's own doesn't have it."""
    node: Any = config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else getattr(node, part)
    return node


def _experts(config: RunConfig, layout: Layout) -> Problems:
    if class_path(config.model) == MoeTransformerConfig._target_:
        yield from _mixture(config)
    if layout.expert == 1:
        return
    experts = count(config, "experts")[1]
    if experts is None and (class_path(config.model) in KEYS or reads(config.model) == "images"):
        rule = "splits the experts of a model, and this model has none (model=moe_tiny has)"
        yield without_axis("expert", rule, config=config, layout=layout)
    elif experts is not None and experts % layout.expert:
        rule = f"does not divide model.experts = {experts}: each device has the same number of experts"
        yield with_degree_near("expert", rule, experts, config=config, layout=layout)
    dim = count(config, "dim")[1]
    if dim is not None and (uneven := layout.uneven_slices(dim)):
        yield with_degree_near("shard", uneven, dim, config=config, layout=layout)
    if layout.by_fully_shard and (outdated := too_old((2, 13))):
        rule = f"in slices (strategy.shard or strategy.tensor) {outdated}"
        yield without_axis("expert", rule, config=config, layout=layout)


def _mixture(config: RunConfig) -> Problems:
    experts, per_token = config.model["experts"], config.model["experts_per_token"]
    if isinstance(experts, int) and isinstance(per_token, int) and not 1 <= per_token <= experts:
        rule = f"must be from 1 to model.experts = {experts}"
        yield Problem("model.experts_per_token", per_token, rule, (min(2, max(1, experts)),))
    elif per_token == 1 and config.model["renormalise"]:
        rule = "makes the gate of a token's only expert 1, so that its router learns nothing from the loss"
        yield Problem("model.renormalise", True, rule, (False,))
    if config.model["balance_step"] and config.strategy.execution != SPMD:
        rule = (
            f"can't be used with strategy={config.strategy.name}, which does not count every sample's experts"
        )
        yield Problem("model.balance_step", config.model["balance_step"], rule, (0.0,))
    layers, dense = config.model["layers"], config.model["dense_layers"]
    if isinstance(layers, int) and isinstance(dense, int) and dense >= layers >= 1:
        rule = f"must be less than model.layers = {layers}, or no block would have experts"
        yield Problem("model.dense_layers", dense, rule, (layers - 1,))


def sequence_problems(config: RunConfig, layout: Layout) -> Problems:
    """The axes must divide a sequence. With `all_to_all`, `context` must also divide the heads.

    `context` gives each device two slices of a sequence. `tensor` then divides the positions of a device.
    """
    length, tensor = sequence_length(config), layout.tensor if config.strategy.sequence_parallel else 1
    unit = layout.context * math.lcm(2 if layout.context > 1 else 1, tensor)
    if length is not None and length >= 1 and length % unit:
        degrees = {"context": layout.context, "tensor": tensor}
        splits = [f"strategy.{axis} = {degree}" for axis, degree in degrees.items() if degree > 1]
        what = "two slices of the same length" if layout.context > 1 else "the same number of positions"
        rule = f"does not divide by {unit} for {' and '.join(splits)}: each device keeps {what}"
        yield Problem("data.sequence_length", length, rule, multiples_near(length, unit))
    if layout.context > 1 and config.strategy.context_attention == "all_to_all":
        yield from _heads_of_all_to_all(config, layout)


def _heads_of_all_to_all(config: RunConfig, layout: Layout) -> Problems:
    """`context` must divide the heads that `tensor` leaves on a device.

    The number of key-value heads that `tensor` leaves must divide `context`, or the reverse.
    """
    degree, tensor = layout.context, layout.tensor
    (key, heads), (kv_key, kv_heads) = count(config, "heads"), count(config, "kv_heads")
    # tensor_problems reports heads that `tensor` does not divide.
    if not heads or not kv_heads or heads % tensor or kv_heads % tensor:
        return
    left, kv_left = heads // tensor, kv_heads // tensor
    if left % degree or (kv_left % degree and degree % kv_left):
        of_tensor = f", of which strategy.tensor leaves {left} and {kv_left}" if tensor > 1 else ""
        counts = f"{key} = {heads} and {kv_key} = {kv_heads}{of_tensor}"
        rule = f"can't give each of {degree} devices whole heads: {counts}"
        yield Problem("strategy.context_attention", "all_to_all", rule, ("ring", "gather"))


def tensor_problems(config: RunConfig, layout: Layout) -> Problems:
    """The degree must divide heads, columns and vocabulary; in a convnet, the logits of its classifier."""
    degree = layout.tensor
    if degree == 1:
        return
    if is_convnet(config.model):
        yield from _classifier(config, layout)
    (key, heads), (kv_key, kv_heads) = count(config, "heads"), count(config, "kv_heads")
    if not heads or not kv_heads:
        return
    if math.gcd(heads, kv_heads) % degree:
        counts = f"{key} = {heads} and {kv_key} = {kv_heads}"
        rule = f"does not divide {counts}: each device needs whole heads"
        yield with_degree_near("tensor", rule, heads, kv_heads, config=config, layout=layout)
        return
    for split, what in (("columns", "columns"), (DENSE, "columns"), ("vocabulary", "rows of the embedding")):
        key, size = count(config, split)
        if size and size % degree:
            rule = f"does not divide by strategy.tensor = {degree}: devices have equal numbers of {what}"
            above = -(-size // degree) * degree  # a smaller vocabulary would lose tokens
            yield Problem(key, size, rule, (above,))


def _classifier(config: RunConfig, layout: Layout) -> Problems:
    degree, model = layout.tensor, config.model
    if model["_target_"] != ConvNetConfig._target_:
        rule = f"splits linear layers, and a {model['_target_'].rpartition('.')[2]} has none"
        yield without_axis("tensor", rule, config=config, layout=layout)
    elif model["classes"] % degree:
        rule = f"does not divide by strategy.tensor = {degree}: each device has the same number of logits"
        yield Problem("model.classes", model["classes"], rule, (-(-model["classes"] // degree) * degree,))


def _tiles(config: RunConfig, layout: Layout) -> Problems:
    """Each tile needs a position on every feature map, and whole pixels for each of its positions."""
    degree, grid = layout.tile, config.strategy.tile_grid
    if grid is not None and (len(grid) != 2 or min(grid) < 1 or math.prod(grid) != degree):
        rule = f"is not a grid [rows,columns] of {degree} tiles"
        legal = [[rows, degree // rows] for rows in divisors(degree)]
        yield Problem("strategy.tile_grid", grid, rule, tuple(legal[:3]))
    elif "height" in config.data and is_convnet(config.model) and sizes_are_legal(config):
        yield from _maps(config.model, config.data, grid=tile_grid(degree, grid))


def _maps(model: dict[str, Any], data: dict[str, Any], *, grid: tuple[int, int]) -> Problems:
    blocks = halvings(model)
    for side, parts in zip(("height", "width"), grid, strict=True):
        size, unit = data[side], parts * 2**blocks
        if model["_target_"] != ConvNetConfig._target_ and size % unit:
            rule = f"does not divide by {parts} tiles x 2^{blocks} for the halvings of {blocks} blocks"
            yield Problem(f"data.{side}", size, rule, multiples_near(size, unit))
        elif size < unit:
            rule = f"is too small for {parts} tiles and {blocks} blocks, which each halve it"
            yield Problem(f"data.{side}", size, rule, (unit,))


SIZE_CHECKS: dict[str, Callable[[RunConfig, Layout], Problems]] = {
    "pipeline": pipeline_checks.find_problems,
    "expert": _experts,
    "context": sequence_problems,
    "tensor": tensor_problems,
    "tile": _tiles,
}
"""The check of an axis whose degree must fit sizes. It is called for degree 1 too."""
