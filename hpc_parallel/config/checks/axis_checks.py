"""Check each axis of a layout: what it declares in `config/axes.py`, and whether sizes fit its degree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpc_parallel.config.axes import DECLARED, Axis
from hpc_parallel.config.checks import (
    context_checks,
    expert_checks,
    pipeline_checks,
    tensor_checks,
    tile_checks,
)
from hpc_parallel.config.checks.image_checks import reads
from hpc_parallel.config.checks.suggestions import along_with_less_of
from hpc_parallel.config.layout import Layout
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.problems import Problem, Problems

SIZES: dict[str, Callable[[RunConfig, Layout], Problems]] = {
    "pipeline": pipeline_checks.find_problems,
    "expert": expert_checks.find_problems,
    "context": context_checks.find_problems,
    "tensor": tensor_checks.find_problems,
    "tile": tile_checks.find_problems,
}
"""The check of an axis whose degree must fit sizes. It is called for degree 1 too."""


def find_problems(config: RunConfig, layout: Layout) -> Problems:
    for axis in DECLARED:
        degree = layout.degrees[axis.name]
        declared = list(_declared(axis, degree, config=config, layout=layout)) if degree > 1 else []
        yield from declared
        if not declared and axis.name in SIZES:
            yield from SIZES[axis.name](config, layout)


def _declared(axis: Axis, degree: int, *, config: RunConfig, layout: Layout) -> Problems:
    kind = reads(config.model)
    if axis.reads is not None and kind is not None and kind != axis.reads:
        rule = f"splits {axis.reads}, and the model reads {kind}"
        along = along_with_less_of(axis.name, config.strategy)
        yield Problem(f"strategy.{axis.name}", degree, rule, (1,), along)
        return
    for other, reason in axis.apart.items():
        if (size := layout.degrees[other]) > 1:
            rule = f"can't be combined with strategy.{axis.name} = {degree}: {reason}"
            yield Problem(f"strategy.{other}", size, rule, (1,), along_with_less_of(other, config.strategy))
    for conflict in axis.conflicts:
        holds = all(_value_at(config, key) == value for key, value in conflict.when.items())
        if holds and _value_at(config, conflict.key) == conflict.value:
            rule = f"can't be combined with strategy.{axis.name} = {degree}: {conflict.reason}"
            yield Problem(conflict.key, conflict.value, rule, conflict.legal)


def _value_at(config: RunConfig, key: str) -> Any:
    """The value of a dotted key; None if a table of the user's own doesn't have it."""
    node: Any = config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else getattr(node, part)
    return node
