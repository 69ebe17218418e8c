"""`summary.json` of a run that went well: what it was, how far it came, how fast."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime
from statistics import median
from typing import Any

from hpc_parallel.config.layout import Layout
from hpc_parallel.config.schema import RunConfig


def summarise(
    config: RunConfig,
    *,
    layout: Layout,
    lines: Sequence[dict[str, Any]],
    started: datetime,
    ended: datetime,
    job_ids: Sequence[str],
) -> dict[str, Any]:
    """All keys of the contract; null where a figure is not measured."""
    steady = lines[1:] or lines  # the first line holds the warm-up
    last = lines[-1]
    validation = [line["validation_loss"] for line in lines if "validation_loss" in line]
    return {
        "outcome": "completed",
        "strategy": config.strategy.name,
        "layout": layout.degrees,
        "nodes": config.nodes,
        "gpus_per_node": config.gpus_per_node,
        "world_size": layout.devices,
        "steps": last["step"],
        "samples": last["samples"],
        "final_loss": last["loss"],
        "validation_loss": validation[-1] if validation else None,
        "samples_per_s": median(line["samples_per_s"] for line in steady),
        "step_time_s": median(line["step_time_s"] for line in steady),
        "latency_s": None,
        "peak_memory_bytes": max(line["peak_memory_bytes"] for line in lines),
        "exposed_communication_share": None,
        "bubble_share": None,
        "predicted": None,
        "restarts": 0,
        "lost_steps": 0,
        "started": started.isoformat(),
        "ended": ended.isoformat(),
        "job_ids": list(job_ids),
    }
