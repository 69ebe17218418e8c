"""Check that the axes can split a sequence, or the heads that see all of it."""

from __future__ import annotations

import math

from hpc_parallel.config.checks.suggestions import multiples_near
from hpc_parallel.config.counts import count
from hpc_parallel.config.layout import Layout
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.problems import Problem, Problems


def find_problems(config: RunConfig, layout: Layout) -> Problems:
    yield from _sequence(config, layout)
    if layout.context > 1 and config.strategy.context_attention == "all_to_all":
        yield from _heads(config, layout)


def _heads(config: RunConfig, layout: Layout) -> Problems:
    """`context` divides the heads that `tensor` leaves; key-value heads divide it, or it divides them."""
    degree, tensor = layout.context, layout.tensor
    heads, kv_heads = count(config, "heads")[1], count(config, "kv_heads")[1]
    if not heads or not kv_heads or heads % tensor or kv_heads % tensor:  # tensor_checks reports the last
        return
    heads, kv_heads = heads // tensor, kv_heads // tensor
    if heads % degree or (kv_heads % degree and degree % kv_heads):
        key, kv_key = (count(config, what)[0] for what in ("heads", "kv_heads"))
        of_tensor = f", of which strategy.tensor leaves {heads} and {kv_heads}" if tensor > 1 else ""
        counts = f"{key} = {heads * tensor} and {kv_key} = {kv_heads * tensor}{of_tensor}"
        rule = f"can't give each of {degree} devices whole heads: {counts}"
        yield Problem("strategy.context_attention", "all_to_all", rule, ("ring", "gather"))


def _sequence(config: RunConfig, layout: Layout) -> Problems:
    """The axes must divide a sequence: `context` takes two slices per device, then `tensor` takes one."""
    length = config.data.get("sequence_length") if isinstance(config.data, dict) else None
    if not isinstance(length, int) or length < 1:
        return
    tensor = layout.tensor if config.strategy.sequence_parallel else 1
    slices = 2 if layout.context > 1 else 1
    unit = layout.context * math.lcm(slices, tensor)
    if length % unit:
        degrees = {"context": layout.context, "tensor": tensor}
        splits = [f"strategy.{axis} = {degree}" for axis, degree in degrees.items() if degree > 1]
        what = "two slices of the same length" if layout.context > 1 else "the same number of positions"
        rule = f"does not divide by {unit} for {' and '.join(splits)}: each device keeps {what}"
        yield Problem("data.sequence_length", length, rule, multiples_near(length, unit))
