"""What the configuration says of a model and its data: class, samples, numbers of blocks, heads, tokens.

From these numbers, the bytes of a reference decoder on one device: its state and a sample's activations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpc_parallel.layout.layout import SPMD, Layout
from hpc_parallel.layout.model_data_schema import (
    ConvNetConfig,
    HuggingFaceConfig,
    MoeTransformerConfig,
    SegmenterConfig,
    TransformerConfig,
    UNetConfig,
)
from hpc_parallel.layout.step_facts import HALF, number_bytes, product_bytes

if TYPE_CHECKING:
    from hpc_parallel.config.schema import RunConfig

_DECODER = {
    "blocks": "layers",
    "heads": "heads",
    "kv_heads": "kv_heads",
    "columns": "ffn_dim",
    "vocabulary": "vocab_size",
}
KEYS = {
    TransformerConfig._target_: _DECODER,
    MoeTransformerConfig._target_: {**_DECODER, "experts": "experts"},
    HuggingFaceConfig._target_: {
        "blocks": "config.num_hidden_layers",
        "heads": "config.num_attention_heads",
        "kv_heads": "config.num_key_value_heads",
        "columns": "config.intermediate_size",
        "vocabulary": "config.vocab_size",
    },
}
# (key, blocks for each number of channels, minus this): a U-Net goes down its levels and up again.
BLOCKS_OF_CHANNELS = {
    ConvNetConfig._target_: ("the length of model.channels", 1, 0),
    SegmenterConfig._target_: ("the length of model.channels", 1, 0),
    UNetConfig._target_: ("2 x the length of model.channels - 1", 2, 1),
}
# For a user's class. Only the built model says how many blocks, heads and experts it has, because
# `layers` may mean something else.
DEFAULT_KEYS = {"vocabulary": "vocab_size"}
MIB, GIB = 2**20, 2**30
LOSS_CHUNK_BYTES = {"cpu": 2**29, "cuda": 2**31}
"""Of the float32 logits that strategies/chunked_loss.py has at a time, by device type."""
STATES = {"adamw": 2}  # tensors of the optimizer as large as the weights; other optimizers count as 0
USABLE = 0.85  # of a device's memory; the rest is for the driver, NCCL and gaps of the allocator
SPLITTING = ("pipeline", "shard", "expert", "tensor")  # axes that give each device a part of the weights


def count(config: RunConfig, what: str) -> tuple[str, int | None]:
    """Returns the key for the number of `what` (a name in KEYS), and the number or None."""
    model = config.model if isinstance(config.model, dict) else {}
    target = class_path(model)
    if what == "blocks" and target in BLOCKS_OF_CHANNELS and isinstance(model.get("channels"), list):
        key, times, fewer = BLOCKS_OF_CHANNELS[target]
        return key, times * len(model["channels"]) - fewer
    keys = KEYS.get(str(target), DEFAULT_KEYS)
    if what not in keys:
        return "the model's blocks" if what == "blocks" else f"model.{what}", None
    key = keys[what]
    value: object = model
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if value is None and what == "kv_heads":
        return f"model.{key}", count(config, "heads")[1]
    return f"model.{key}", value if isinstance(value, int) and value > 0 else None


def class_path(part: Any) -> str | None:
    """The `_target_` of the model or the data; None if there is none."""
    target = part.get("_target_") if isinstance(part, dict) else None
    return None if target is None else str(target)


def sequence_length(config: RunConfig) -> int | None:
    """Tokens in one sample; None if the data does not say."""
    length = config.data.get("sequence_length") if isinstance(config.data, dict) else None
    return length if isinstance(length, int) else None


def is_reference_decoder(config: RunConfig) -> bool:
    """Whether the model is one of our decoders, whose keys and parts are known."""
    return class_path(config.model) in (TransformerConfig._target_, MoeTransformerConfig._target_)


def is_convnet(model: Any) -> bool:
    """Whether the model is one of our models of images."""
    return class_path(model) in BLOCKS_OF_CHANNELS


def reads(model: Any) -> str | None:
    """The kind of samples that a model reads, `text` or `images`; None for a user's class."""
    if is_convnet(model):
        return "images"
    return "text" if class_path(model) in KEYS else None


def halvings(model: dict[str, Any]) -> int:
    """How often one of our models of images halves an image."""
    levels = len(model["channels"])
    return levels - 1 if model["_target_"] == UNetConfig._target_ else levels


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
    """Lower bounds in bytes for one weight with its optimizer state, and for its gradient."""
    number = number_bytes(config)
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
    feed_forward = 3 * dim * columns * (experts or 1) + dim * (experts or 0)  # router: a row per expert
    ends = vocabulary * dim * (1 if config.model.get("tied_head") else 2) + dim
    return blocks * (attention + feed_forward + 2 * dim) + ends


def fitting_samples(config: RunConfig, layout: Layout) -> int | None:
    """Returns the samples of one forward and backward pass that fit, at least 1.

    Returns None for a model of another class, or if `cluster.device_memory_gb` is not set.
    """
    if (memory_gb := config.cluster.device_memory_gb) is None:
        return None
    sample, held = sample_bytes(config, layout), least_bytes(config, layout)
    if sample is None or held is None:
        return None
    free = USABLE * memory_gb * GIB - held - _working_copies(config, layout)
    free -= 3 * LOSS_CHUNK_BYTES["cuda"]  # the logits of a chunk, and two copies
    return max(1, int(free // sample))


def sample_bytes(config: RunConfig, layout: Layout) -> int | None:
    """The bytes that a forward pass of one sample keeps for its backward pass, on one device.

    For each position, a block of our decoders keeps 9 * dim + 2 * kv_heads * head_dim + 4 * ffn_dim numbers.
    The first term is float32 or float64, and the others have the compute dtype. A pipeline rank keeps fewer
    blocks of more microbatches, which needs about the same memory. A test compares this with torch.
    """
    length = sequence_length(config)
    if parameters(config) is None or length is None:
        return None
    blocks, heads, kv_heads, columns, vocabulary = (
        count(config, name)[1] or 0 for name in ("blocks", "heads", "kv_heads", "columns", "vocabulary")
    )
    dim: int = config.model["dim"]
    number, product = number_bytes(config), product_bytes(config)
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
