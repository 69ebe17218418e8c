"""The global batch size of a run for which nobody has set one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

from hpc_parallel.config.layout import Strategy, layout_of
from hpc_parallel.config.model_data_schema import ConvNetConfig, SegmenterConfig, UNetConfig
from hpc_parallel.config.schedules import schedule_of, stages_per_rank
from hpc_parallel.config.schema import StrategyConfig

USUAL = 16
# Digits are small images. Of images of any size, few fit a device.
OF_MODEL = {ConvNetConfig._target_: 64, SegmenterConfig._target_: 8, UNetConfig._target_: 8}


def usual_batch_size(model: Any) -> int:
    """The global batch size that fits `model`, a table with its class, on one device."""
    target = model.get("_target_") if isinstance(model, Mapping) else None
    return OF_MODEL.get(str(target), USUAL)


def default_batch_size(values: Mapping[str, Any]) -> int:
    """Returns the smallest number from the model's usual one on that the layout can split.

    `values`: a resolved configuration. Returns the usual number if the layout is wrong, which checks report.
    """
    least = usual_batch_size(values.get("model"))
    strategy = SimpleNamespace(**values["strategy"])
    try:
        layout = layout_of(cast(Strategy, strategy), devices=values["nodes"] * values["gpus_per_node"])
        unit = layout.data * _microbatches(cast(StrategyConfig, strategy), stages=layout.pipeline)
        unit *= values["training"]["microbatch_size"] or 1
    except (ValueError, TypeError, ZeroDivisionError):
        return least
    return math.ceil(least / unit) * unit if unit > 0 else least


def _microbatches(strategy: StrategyConfig, *, stages: int) -> int:
    """The number of microbatches that a replica needs at least."""
    if strategy.microbatches is not None:
        return strategy.microbatches
    return stages * stages_per_rank(strategy) if stages > 1 and schedule_of(strategy).full else 1
