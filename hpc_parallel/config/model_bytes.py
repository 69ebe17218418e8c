"""The bytes of a reference decoder's weights, gradients and optimizer state on one device, from its sizes."""

from __future__ import annotations

from hpc_parallel.config.counts import count, is_reference_decoder
from hpc_parallel.config.layout import SPMD, Layout
from hpc_parallel.config.schema import RunConfig

GIB = 2**30
LOSS_CHUNK_BYTES = {"cpu": 2**29, "cuda": 2**31}
"""Of the float32 logits that strategies/chunked_loss.py has at a time, by device type."""
STATES = {"adamw": 2}  # tensors of the optimizer as large as the weights; other optimizers count as 0
SPLITTING = ("pipeline", "shard", "expert", "tensor")  # axes that give each device a part of the weights


def least_bytes(config: RunConfig, layout: Layout) -> int | None:
    """A lower bound of the bytes that a device holds between two steps; None for a model of another class.

    Activations, buffers and gathered blocks come on top. Weights are float32 unless `training.precision` is
    float64. Only training has gradients and optimizer state; a worker of a parameter server has no state.
    """
    weights = parameters(config)
    if weights is None:
        return None
    split = 1
    for axis in SPLITTING:
        split *= layout.degrees[axis]
    return weights * sum(bytes_of_a_weight(config)) // split


def bytes_of_a_weight(config: RunConfig) -> tuple[int, int]:
    """Lower bounds for a weight with the optimizer's state, and for its gradient."""
    number = 8 if config.training.precision == "float64" else 4
    if not trains(config):
        return number, 0
    spmd = config.strategy.execution == SPMD
    return number * (1 + (STATES.get(config.optimizer.name, 0) if spmd else 0)), number


def trains(config: RunConfig) -> bool:
    """Whether the task has gradients and an optimizer."""
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
