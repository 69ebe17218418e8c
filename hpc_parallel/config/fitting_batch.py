"""The samples that fit in a device's memory at once, estimated from the shapes of a reference decoder."""

from __future__ import annotations

from hpc_parallel.config.counts import count
from hpc_parallel.config.layout import Layout
from hpc_parallel.config.model_bytes import GIB, LOSS_CHUNK_BYTES, least_bytes, parameters
from hpc_parallel.config.schema import RunConfig

USABLE = 0.85  # of a device's memory; the rest is for the driver, NCCL and gaps of the allocator
HALF = ("bfloat16", "float16")


def fitting_samples(config: RunConfig, layout: Layout) -> int | None:
    """Returns the samples of one forward and backward pass that fit, at least 1.

    Returns None if that is unknown: for a model of another class, or without `cluster.device_memory_gb`.
    """
    memory_gb, sample = config.cluster.device_memory_gb, sample_bytes(config, layout)
    held = least_bytes(config, layout)
    if memory_gb is None or sample is None or held is None:
        return None
    free = USABLE * memory_gb * GIB - held - _working_copies(config, layout)
    free -= 3 * LOSS_CHUNK_BYTES["cuda"]  # the logits of a chunk, and two copies
    return max(1, int(free // sample))


def sample_bytes(config: RunConfig, layout: Layout) -> int | None:
    """The bytes that a forward pass of one sample keeps for its backward pass, on one device.

    A block of our decoders keeps 9 numbers a position for each of its `dim`, 2 for each of its key-value
    heads' width, and 4 for each of `ffn_dim`; in half precision the last two are of that type. A pipeline's
    rank keeps fewer blocks of more microbatches, which is about the same. A test compares this with torch.
    """
    length = config.data.get("sequence_length") if isinstance(config.data, dict) else None
    if parameters(config) is None or not isinstance(length, int):
        return None
    blocks, heads, kv_heads, columns, vocabulary = (
        count(config, name)[1] or 0 for name in ("blocks", "heads", "kv_heads", "columns", "vocabulary")
    )
    dim: int = config.model["dim"]
    number = 8 if config.training.precision == "float64" else 4
    product = 2 if config.training.precision in HALF else number
    columns *= config.model.get("experts_per_token") or 1
    of_block = 9 * dim * number + (2 * kv_heads * (dim // heads) + 4 * columns) * product
    if config.training.activation_checkpointing == "full":
        of_blocks = blocks * dim * number + of_block
    else:
        of_blocks = blocks * of_block
    of_head = 2 * dim * number if config.training.chunked_loss else 3 * vocabulary * number
    return length * (of_blocks + of_head) // (layout.tensor * layout.context)


def _working_copies(config: RunConfig, layout: Layout) -> int:
    """The bytes of the weights in half precision that a step computes with."""
    split = layout.pipeline * layout.tensor
    return 2 * (parameters(config) or 0) // split if config.training.precision in HALF else 0
