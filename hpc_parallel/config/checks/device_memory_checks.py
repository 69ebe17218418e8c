"""Refuse a reference decoder whose weights, gradients and optimizer state alone exceed a device's memory.

`config/site_limits.py` compares the memory that a job requests (`launcher.memory_gb`) with the partition.
"""

from __future__ import annotations

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.layout.layout import Layout
from hpc_parallel.layout.model_bytes import GIB, least_bytes, trains
from hpc_parallel.problems import Problem, Problems


def find_problems(config: RunConfig, layout: Layout) -> Problems:
    """Yields a problem if `cluster.device_memory_gb` is set and the model can't fit."""
    memory_gb = config.cluster.device_memory_gb
    least = least_bytes(config, layout)
    if memory_gb is None or least is None or least <= memory_gb * GIB:
        return
    held = "weights, gradients and optimizer state" if trains(config) else "weights"
    rule = (
        f"is less than the {least / GIB:.1f} GB of {held} that a device holds at least in this layout "
        f"({layout}). Use more devices with strategy=fsdp, or a smaller model"
    )
    yield Problem("cluster.device_memory_gb", memory_gb, rule)
