"""What the configuration says of a model and its data: class, samples, numbers of blocks, heads, tokens.

From these numbers, the bytes of a reference decoder on one device: its state and a sample's activations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
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
from hpc_parallel.layout.step_facts import HALF, number_bytes, packs, product_bytes, state_bytes, weight_bytes

if TYPE_CHECKING:
    from hpc_parallel.config.schema import RunConfig

DENSE = "dense_ffn_dim"  # of the first blocks of a mixture of experts; may be null
_DECODER = {
    "dim": "dim",
    "blocks": "layers",
    "heads": "heads",
    "kv_heads": "kv_heads",
    "columns": "ffn_dim",
    "vocabulary": "vocab_size",
}
KEYS = {
    TransformerConfig._target_: _DECODER,
    MoeTransformerConfig._target_: {**_DECODER, "experts": "experts", DENSE: DENSE},
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
Shape = tuple[int, ...]


@dataclass(frozen=True)
class DecoderSizes:
    """The sizes of a decoder, from which its weights, FLOPs and activations are counted.

    ffn_matrices: 2, or 3 with a gate. flash: scores do not reach memory. tied: embedding and head share a
    weight. masked: documents are packed, so attention computes all scores, under a mask. experts: the number
    of feed-forward networks of a block; a token uses `per_token` of them. A model without a mixture has one.
    router: the outputs of a block's router; 0 without a mixture.
    head_dim: the width of a head; None: `dim / heads`. qk_norm: each head's queries and keys are normed.
    shared: the number of experts that every token uses, beside `experts`. The first `dense_layers` blocks
    have one feed-forward network of the width `dense_ffn_dim` instead of a mixture.
    """

    layers: int
    dim: int
    heads: int
    kv_heads: int
    ffn_dim: int
    vocabulary: int
    sequence: int
    ffn_matrices: int = 2
    flash: bool = False
    tied: bool = True
    experts: int = 1
    per_token: int = 1
    router: int = 0
    masked: bool = False
    head_dim: int | None = None
    qk_norm: bool = False
    shared: int = 0
    dense_layers: int = 0
    dense_ffn_dim: int = 0

    @property
    def head_width(self) -> int:
        return self.head_dim or self.dim // self.heads

    @property
    def query_dim(self) -> int:
        """The width of all query heads together."""
        return self.heads * self.head_width

    @property
    def kv_dim(self) -> int:
        """The width of all key heads together."""
        return self.kv_heads * self.head_width

    @property
    def normed_dim(self) -> int:
        """The width of the queries and keys that are normed."""
        return self.query_dim + self.kv_dim if self.qk_norm else 0

    @property
    def attention(self) -> tuple[Shape, ...]:
        """The matrices of queries, keys, values and outputs."""
        of_kv = self.kv_dim, self.dim
        return (self.query_dim, self.dim), of_kv, of_kv, (self.dim, self.query_dim)

    @property
    def feed_forward(self) -> tuple[Shape, ...]:
        """The matrices of one feed-forward network: gate (if it has one), up and down."""
        return *((self.ffn_dim, self.dim),) * (self.ffn_matrices - 1), (self.dim, self.ffn_dim)

    def weights_with(self, experts: float) -> float:
        """The weights of one block with this number of its experts, its router and shared experts."""
        return self.attention_weights + self.dim * self.router + (experts + self.shared) * self.expert_weights

    def dense_weights(self, blocks: int) -> float:
        """The weights of the matrices of `blocks` blocks without experts."""
        return blocks * (self.attention_weights + self.ffn_matrices * self.dim * self.dense_ffn_dim)

    @property
    def attention_weights(self) -> int:
        return sum(map(math.prod, self.attention))

    @property
    def expert_weights(self) -> int:
        """The weights of one feed-forward network."""
        return sum(map(math.prod, self.feed_forward))

    @property
    def end_weights(self) -> int:
        """The weights of the embedding, or of the head."""
        return self.vocabulary * self.dim

    def stage_weights(self, blocks: int, *, first: bool, last: bool, experts: float | None = None) -> float:
        """The weights of a stage, or of a rank with several stages.

        first, last: whether it has the first and the last stage. experts: the number of experts in each
        block; None: all.
        """
        ends = first + last - (first and last and self.tied)
        held, dense = self.experts if experts is None else experts, min(blocks, self.dense_layers) * first
        mixtures = (blocks - dense) * self.weights_with(held)
        return mixtures + self.dense_weights(dense) + ends * self.end_weights

    @property
    def block_flops(self) -> float:
        """FLOPs of one sample in a block: products with its weights, and attention over the visible tokens.

        The metrics of a run count the same.
        """
        return 2 * self.sequence * self.weights_with(self.per_token) + self.attention_flops

    @property
    def attention_flops(self) -> int:
        """FLOPs of one sample in the attention of a block: scores and values, 4 * query_dim for a pair."""
        return 2 * self.sequence * (self.sequence + 1) * self.query_dim

    @property
    def head_flops(self) -> int:
        """FLOPs of one sample's logits."""
        return 2 * self.sequence * self.end_weights

    @property
    def forward_flops(self) -> float:
        """FLOPs of one sample in the whole model."""
        dense = 2 * self.sequence * self.dense_weights(self.dense_layers)
        dense += self.dense_layers * self.attention_flops
        return (self.layers - self.dense_layers) * self.block_flops + dense + self.head_flops


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


def least_bytes(config: RunConfig, layout: Layout, *, gradients: bool = True) -> int | None:
    """A lower bound of the bytes that a device holds between two steps; None for a model of another class.

    Activations, buffers and gathered blocks come on top. Only training has gradients and
    optimizer state; a worker of a parameter server has no state.

    gradients: whether to count them.
    """
    weights = parameters(config)
    if weights is None:
        return None
    split = 1
    for axis in SPLITTING:
        split *= layout.degrees[axis]
    return weights * sum(bytes_of_a_weight(config)[: 1 + gradients]) // split


def bytes_of_a_weight(config: RunConfig) -> tuple[int, int]:
    """Lower bounds in bytes for one weight with its optimizer state, and for its gradient."""
    number = weight_bytes(config)
    if not trains(config):
        return number, 0
    tensors = STATES.get(config.optimizer.name, 0) if config.strategy.execution == SPMD else 0
    return number + tensors * state_bytes(config), number


def trains(config: RunConfig) -> bool:
    """Whether the task has gradients and an optimizer."""
    return config.task.name in ("train", "proof")


def decoder_sizes(config: RunConfig) -> DecoderSizes | None:
    """The sizes of a reference decoder; None for another class, or without valid sizes."""
    if not is_reference_decoder(config):
        return None
    model = config.model
    sizes = {name: count(config, name)[1] or 0 for name in KEYS[model["_target_"]] if name != DENSE}
    if not all(sizes.values()):
        return None
    return DecoderSizes(
        sizes["blocks"], sizes["dim"], sizes["heads"], sizes["kv_heads"], sizes["columns"],
        sizes["vocabulary"], sequence_length(config) or 0, ffn_matrices=3, flash=True,
        tied=bool(model.get("tied_head")), experts=sizes.get("experts", 1),
        per_token=model.get("experts_per_token") or 1, router=sizes.get("experts", 0), masked=packs(config),
        head_dim=model.get("head_dim"), qk_norm=bool(model.get("qk_norm")),
        shared=model.get("shared_experts") or 0, dense_layers=model.get("dense_layers") or 0,
        dense_ffn_dim=model.get(DENSE) or sizes["columns"],
    )  # fmt: skip


def parameters(config: RunConfig) -> int | None:
    """The number of parameters of a reference decoder; None for another class, or without valid sizes."""
    sizes = decoder_sizes(config)
    if sizes is None:
        return None
    norms = 2 * sizes.dim + (2 * sizes.head_width if sizes.qk_norm else 0)
    mixtures = (sizes.layers - sizes.dense_layers) * int(sizes.weights_with(sizes.experts))
    blocks = mixtures + int(sizes.dense_weights(sizes.dense_layers))
    return blocks + sizes.layers * norms + sizes.end_weights * (1 if sizes.tied else 2) + sizes.dim


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

    For each position, a block of our decoders keeps 9 * dim + 2 * kv_heads * head_dim + 4 * ffn_dim numbers
    (3 of the 9 are queries and mixed heads; norms of heads add their inputs and outputs).
    The first term is float32 or float64, and the others have the compute dtype. A pipeline rank keeps fewer
    blocks of more microbatches, which needs about the same memory. A test compares this with torch.
    """
    sizes, length = decoder_sizes(config), sequence_length(config)
    if sizes is None or length is None:
        return None
    dim, blocks = sizes.dim, sizes.layers
    number, product = number_bytes(config), product_bytes(config)
    kv = sizes.query_dim if sizes.masked else sizes.kv_dim
    columns = (sizes.per_token + sizes.shared) * sizes.ffn_dim
    of_block = (6 * dim + 3 * sizes.query_dim + 2 * sizes.normed_dim) * number
    of_block += (2 * kv + 4 * columns) * product
    if config.training.activation_checkpointing == "full":
        of_blocks = blocks * dim * number + of_block
    else:
        of_blocks = blocks * of_block
    of_head = 2 * dim * number if config.training.chunked_loss else 3 * sizes.vocabulary * number
    bias = length * product if sizes.masked else 0  # of packed documents
    return length * ((of_blocks + of_head) // layout.tensor + bias) // layout.context


def _working_copies(config: RunConfig, layout: Layout) -> int:
    """The bytes of the weights in half precision that a step computes with."""
    split = layout.pipeline * layout.tensor
    copies = config.training.precision in HALF and weight_bytes(config) > product_bytes(config)
    return 2 * (parameters(config) or 0) // split if copies else 0
