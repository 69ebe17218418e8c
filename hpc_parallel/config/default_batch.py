"""The global batch size of a run for which nobody has set one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

from hpc_parallel.config.layout import Strategy, layout_of
from hpc_parallel.config.schedules import schedule_of, stages_per_rank
from hpc_parallel.config.schema import StrategyConfig

LEAST = 16


def default_batch_size(values: Mapping[str, Any]) -> int:
    """Returns the smallest number from LEAST on that the layout of a resolved configuration can split.

    Returns LEAST if the layout is wrong; the checks report that.
    """
    strategy = SimpleNamespace(**values["strategy"])
    try:
        layout = layout_of(cast(Strategy, strategy), devices=values["nodes"] * values["gpus_per_node"])
        unit = layout.data * _microbatches(cast(StrategyConfig, strategy), stages=layout.pipeline)
        unit *= values["training"]["microbatch_size"] or 1
    except (ValueError, TypeError, ZeroDivisionError):
        return LEAST
    return math.ceil(LEAST / unit) * unit if unit > 0 else LEAST


def _microbatches(strategy: StrategyConfig, *, stages: int) -> int:
    """The number of microbatches that a replica needs at least."""
    if strategy.microbatches is not None:
        return strategy.microbatches
    return stages * stages_per_rank(strategy) if stages > 1 and schedule_of(strategy).full else 1
