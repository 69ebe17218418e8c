"""Check that the tensor axis can split the layers: heads, columns, vocabulary, logits."""

from __future__ import annotations

import math

from hpc_parallel.config.checks.image_checks import is_convnet
from hpc_parallel.config.checks.suggestions import along_with_less_of, degrees_near
from hpc_parallel.config.counts import count
from hpc_parallel.config.layout import Layout
from hpc_parallel.config.model_data_schema import ConvNetConfig
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.problems import Problem, Problems


def find_problems(config: RunConfig, layout: Layout) -> Problems:
    if layout.tensor > 1:
        yield from _splits(config, layout)
        yield from _classifier(config, layout)


def _splits(config: RunConfig, layout: Layout) -> Problems:
    """The degree must divide heads, columns and vocabulary."""
    degree = layout.tensor
    heads, kv_heads = count(config, "heads")[1], count(config, "kv_heads")[1]
    if heads and kv_heads:
        if math.gcd(heads, kv_heads) % degree:
            yield _heads_problem(config, layout, heads=heads, kv_heads=kv_heads)
            return
        for split, what in (("columns", "columns"), ("vocabulary", "rows of the embedding")):
            key, size = count(config, split)
            if size and size % degree:
                rule = f"does not divide by strategy.tensor = {degree}: devices have equal numbers of {what}"
                above = -(-size // degree) * degree  # a smaller vocabulary would lose tokens
                yield Problem(key, size, rule, (above,))


def _heads_problem(config: RunConfig, layout: Layout, *, heads: int, kv_heads: int) -> Problem:
    along = along_with_less_of("tensor", config.strategy)
    near = degrees_near("tensor", config, layout, heads, kv_heads)
    keys = [count(config, what)[0] for what in ("heads", "kv_heads")]
    counts = f"{keys[0]} = {heads} and {keys[1]} = {kv_heads}"
    rule = f"does not divide {counts}: each device needs whole heads"
    return Problem("strategy.tensor", layout.tensor, rule, near, along)


def _classifier(config: RunConfig, layout: Layout) -> Problems:
    """In a convnet only the classifier is split, by its logits."""
    degree, model = layout.tensor, config.model
    if not is_convnet(model):
        return
    if model["_target_"] != ConvNetConfig._target_:
        rule = f"splits linear layers, and a {model['_target_'].rpartition('.')[2]} has none"
        yield Problem("strategy.tensor", degree, rule, (1,), along_with_less_of("tensor", config.strategy))
    elif model["classes"] % degree:
        rule = f"does not divide by strategy.tensor = {degree}: each device has the same number of logits"
        yield Problem("model.classes", model["classes"], rule, (-(-model["classes"] // degree) * degree,))
