"""Check that the axes can split a sequence."""

from __future__ import annotations

import math

from hpc_parallel.config.checks.suggestions import multiples_near
from hpc_parallel.config.layout import Layout
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.problems import Problem, Problems


def find_problems(config: RunConfig, layout: Layout) -> Problems:
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
