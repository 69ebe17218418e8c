"""Refuse a reference decoder whose weights, gradients and optimizer state alone exceed a device's memory."""

from __future__ import annotations

from hpc_parallel.config.checks.counts import count, is_reference_decoder
from hpc_parallel.config.layout import SPMD, Layout
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.problems import Problem, Problems

GIB = 2**30
STATES = {"adamw": 2}  # tensors of the optimizer as large as the weights; other optimizers count as 0
SPLITTING = ("pipeline", "shard", "expert", "tensor")  # axes that give each device a part of the weights


def find_problems(config: RunConfig, layout: Layout) -> Problems:
    """Yields a problem if `cluster.device_memory_gb` is set and the model can't fit."""
    memory_gb = config.cluster.device_memory_gb
    least = least_bytes(config, layout)
    if memory_gb is None or least is None or least <= memory_gb * GIB:
        return
    held = "weights, gradients and optimizer state" if _trains(config) else "weights"
    rule = (
        f"is less than the {least / GIB:.1f} GB of {held} that a device holds at least in this layout "
        f"({layout}). Use more devices with strategy=fsdp, or a smaller model"
    )
    yield Problem("cluster.device_memory_gb", memory_gb, rule)


def least_bytes(config: RunConfig, layout: Layout) -> int | None:
    """A lower bound of the bytes that a device holds between two steps; None for a model of another class.

    Activations, buffers and gathered blocks come on top. Weights are float32 unless `training.precision` is
    float64. Only training has gradients and optimizer state; a worker of a parameter server has no state.
    """
    weights = parameters(config)
    if weights is None:
        return None
    copies = 1
    if _trains(config):
        spmd = config.strategy.execution == SPMD
        copies += 1 + (STATES.get(config.optimizer.name, 0) if spmd else 0)
    split = 1
    for axis in SPLITTING:
        split *= layout.degrees[axis]
    return copies * weights * (8 if config.training.precision == "float64" else 4) // split


def _trains(config: RunConfig) -> bool:
    return config.task.name in ("train", "proof")


def parameters(config: RunConfig) -> int | None:
    """The number of parameters of a reference decoder; None for another class, or without valid sizes."""
    if not is_reference_decoder(config):
        return None
    dim = config.model.get("dim")
    sizes = [count(config, name)[1] for name in ("blocks", "heads", "kv_heads", "columns", "vocabulary")]
    if not isinstance(dim, int) or dim < 1 or None in sizes:
        return None
    blocks, heads, kv_heads, columns, vocabulary = (size or 0 for size in sizes)
    attention = 2 * dim * dim + 2 * dim * kv_heads * (dim // heads)
    experts = count(config, "experts")[1]
    feed_forward = 3 * dim * columns * (experts or 1) + dim * (experts or 0)  # the router has a row for each
    ends = vocabulary * dim * (1 if config.model.get("tied_head") else 2) + dim
    return blocks * (attention + feed_forward + 2 * dim) + ends
