"""Every weight of our models by name and shape, from the model's configuration, without torch.

tests/unit/test_plan_state.py compares the lists with the built models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from hpc_parallel.layout.counts import DecoderSizes, Shape
from hpc_parallel.layout.model_data_schema import (
    ConvNetConfig,
    HuggingFaceConfig,
    MoeTransformerConfig,
    SegmenterConfig,
    TransformerConfig,
    UNetConfig,
)
from hpc_parallel.layout.stage_cuts import PartCosts, PartFlops

STEM, HEAD = "stem", "head"


@dataclass(frozen=True)
class Weight:
    """A parameter of the whole model.

    tensor_dim: the dim that the tensor axis splits, or None. casts: whether a bfloat16 step without
    fully_shard computes with a copy of the weight (`strategies/working_weights.py`). of_experts: whether the
    first dim is the experts. sliced_dim: the dim that fully_shard slices if the expert axis splits the first.
    """

    name: str
    shape: tuple[int, ...]
    tensor_dim: int | None = None
    casts: bool = True
    of_experts: bool = False
    sliced_dim: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def part(self) -> str:
        """`stem`, `head`, or the number of a block."""
        names = self.name.split(".")
        return names[1] if names[0] == "blocks" else names[0]


@dataclass(frozen=True)
class ModelWeights:
    """The weights in the order of the model. The copy of a tied weight is only in `tied`."""

    weights: tuple[Weight, ...]
    tied: Mapping[str, str]  # the name of the copy -> the name of the weight
    flops: PartFlops

    @property
    def blocks(self) -> int:
        return len(self.flops.blocks)

    def stage(self, blocks: range) -> list[Weight]:
        """The weights of a stage with these `blocks`, in order. A copy of a tied weight has its own name."""
        parts = {str(index) for index in blocks}
        parts |= {STEM} if blocks.start == 0 else set()
        parts |= {HEAD} if blocks.stop == self.blocks else set()
        held = [weight for weight in self.weights if weight.part in parts]
        names = {weight.name for weight in held}
        originals = {weight.name: weight for weight in self.weights}
        for copy, name in self.tied.items():
            if HEAD in parts and name not in names:
                original = originals[name]
                held.append(Weight(copy, original.shape, original.tensor_dim, original.casts))
        return held

    @cached_property
    def numbers(self) -> PartCosts:
        """Parameters of each part; a weight that stem and head share counts twice."""
        counts = dict.fromkeys((STEM, *map(str, range(self.blocks)), HEAD), 0)
        for weight in self.weights:
            counts[weight.part] += weight.numel
            counts[HEAD] += weight.numel if weight.name in self.tied.values() else 0
        blocks = tuple(counts[str(index)] for index in range(self.blocks))
        return PartCosts(stem=counts[STEM], blocks=blocks, head=counts[HEAD])


def weights_of(model: Any, *, sample_shape: tuple[int, ...] | None) -> ModelWeights | None:
    """The weights of a recorded `model`; None for a class that is not ours, or without valid sizes.

    sample_shape: of `sample_shape_of`; the costs of the parts depend on it.
    """
    list_weights = _LISTS.get(model.get("_target_")) if isinstance(model, dict) else None
    if list_weights is None or sample_shape is None:
        return None
    try:
        return list_weights(model, sample_shape)
    except (TypeError, KeyError, ValueError, ZeroDivisionError, AttributeError, IndexError):
        return None


def sample_shape_of(model: Any, data: Any) -> tuple[int, ...] | None:
    """The shape of a sample of recorded `data`: [seq], or [channel, height, width]; None if unknown."""
    if not isinstance(model, dict) or not isinstance(data, dict):
        return None
    image = (model.get("in_channels"), data.get("height"), data.get("width"))
    for shape in ((data.get("sequence_length"),), image):
        if all(isinstance(size, int) for size in shape):
            return tuple(int(size) for size in shape if size is not None)
    return None


def _decoder(model: Mapping[str, Any], sample_shape: Shape) -> ModelWeights:
    """The weights of a model of transformer.py or moe.py."""
    (seq,), experts = sample_shape, model.get("experts")
    sizes = DecoderSizes(
        model["layers"], model["dim"], model["heads"], model["kv_heads"], model["ffn_dim"],
        model["vocab_size"], seq, ffn_matrices=3, tied=model["tied_head"], head_dim=model.get("head_dim"),
    )  # fmt: skip

    def linear(name: str, shape: Shape, tensor_dim: int) -> Weight:
        return Weight(f"{name}.weight", shape, tensor_dim)

    attention, feed_forward = _matrices(sizes)
    dense_layers, shared = model.get("dense_layers") or 0, model.get("shared_experts") or 0
    wide = replace(sizes, ffn_dim=model.get("dense_ffn_dim") or sizes.ffn_dim)
    together = replace(sizes, ffn_dim=shared * sizes.ffn_dim)

    def block(at: str) -> Iterator[Weight]:
        yield Weight(f"{at}.attention_norm.weight", (sizes.dim,))
        yield Weight(f"{at}.feed_forward_norm.weight", (sizes.dim,))
        for name, shape, tensor_dim in attention:
            yield linear(f"{at}.attention.{name}", shape, tensor_dim)
        if model.get("qk_norm"):
            yield Weight(f"{at}.attention.query_norm.weight", (sizes.head_width,))
            yield Weight(f"{at}.attention.key_norm.weight", (sizes.head_width,))
        if experts is None or int(at.rpartition(".")[2]) < dense_layers:
            for name, shape, tensor_dim in feed_forward if experts is None else _matrices(wide)[1]:
                yield linear(f"{at}.feed_forward.{name}", shape, tensor_dim)
            return
        yield Weight(f"{at}.feed_forward.router.weight", (experts, sizes.dim))
        for name, shape, tensor_dim in feed_forward:
            path = f"{at}.feed_forward.experts.{name}"
            dims = {"tensor_dim": tensor_dim + 1, "sliced_dim": 2 - tensor_dim}
            yield Weight(path, (experts, *shape), casts=False, of_experts=True, **dims)
        for name, shape, tensor_dim in _matrices(together)[1] if shared else []:
            yield Weight(f"{at}.feed_forward.shared.{name}", shape, tensor_dim, casts=False)

    unused = (experts - model["experts_per_token"]) * sizes.expert_weights if experts else 0
    return _language(sizes, block, logits="head.output.weight", unused=unused)


Matrix = tuple[str, Shape, int]
"""A name, the shape, and the dim that the tensor axis splits."""


def _matrices(sizes: DecoderSizes) -> tuple[list[Matrix], list[Matrix]]:
    """The matrices of attention and of one feed-forward network."""
    attention = zip(("query", "key", "value", "output"), sizes.attention, (0, 0, 0, 1), strict=True)
    return [*attention], [*zip(("gate", "up", "down"), sizes.feed_forward, (0, 0, 1), strict=True)]


def _llama(model: Mapping[str, Any], sample_shape: Shape) -> ModelWeights | None:
    """The weights of a model of huggingface.py with Llama's layers; None for another model type."""
    config = {key: value for key, value in model["config"].items() if value is not None}
    known = {
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "max_position_embeddings", "tie_word_embeddings", "model_type",
    }  # fmt: skip
    if config["model_type"] != "llama" or not config.keys() <= known:
        return None
    (seq,), heads = sample_shape, config["num_attention_heads"]
    sizes = DecoderSizes(
        config["num_hidden_layers"], config["hidden_size"], heads, config.get("num_key_value_heads", heads),
        config["intermediate_size"], config["vocab_size"], seq, ffn_matrices=3,
        tied=bool(config.get("tie_word_embeddings")),
    )  # fmt: skip

    attention, feed_forward = _matrices(sizes)

    def block(at: str) -> Iterator[Weight]:
        for name, shape, tensor_dim in attention:
            yield Weight(f"{at}.self_attn.{name[0]}_proj.weight", shape, tensor_dim)
        for name, shape, tensor_dim in feed_forward:
            yield Weight(f"{at}.mlp.{name}_proj.weight", shape, tensor_dim)
        yield Weight(f"{at}.input_layernorm.weight", (sizes.dim,))
        yield Weight(f"{at}.post_attention_layernorm.weight", (sizes.dim,))

    return _language(sizes, block, logits="head.logits.weight")


def _language(
    sizes: DecoderSizes,
    block: Callable[[str], Iterator[Weight]],
    *,
    logits: str,
    unused: int = 0,
) -> ModelWeights:
    """The weights of a decoder. unused: the number of expert weights of a block that a token skips."""
    ends = sizes.vocabulary, sizes.dim
    blocks = [list(block(f"blocks.{index}")) for index in range(sizes.layers)]

    def flops(weights: list[Weight]) -> int:
        matrices = sum(weight.numel for weight in weights if len(weight.shape) > 1)
        skipped = unused if any(weight.of_experts for weight in weights) else 0
        return 2 * sizes.sequence * (matrices - skipped) + sizes.attention_flops

    return ModelWeights(
        (
            Weight("stem.weight", ends, 0),
            *(weight for weights in blocks for weight in weights),
            Weight("head.norm.weight", (sizes.dim,)),
            *([] if sizes.tied else [Weight(logits, ends, 0)]),
        ),
        {logits: "stem.weight"} if sizes.tied else {},
        PartFlops(stem=0, blocks=tuple(map(flops, blocks)), head=sizes.head_flops),
    )


def _convolution(name: str, after: int, before: int, kernel: int) -> Weight:
    return Weight(f"{name}.weight", (after, before, kernel, kernel))


def _norm(name: str, channels: int) -> list[Weight]:
    return [Weight(f"{name}.{leaf}", (channels,), casts=False) for leaf in ("weight", "bias")]


def _convnet(model: Mapping[str, Any], sample_shape: tuple[int, ...]) -> ModelWeights:
    _, height, width = sample_shape
    channels, kernel, classes = model["channels"], model["kernel_size"], model["classes"]
    weights, flops = [], []
    for index, (before, after) in enumerate(pairwise([model["in_channels"], *channels])):
        convolution = _convolution(f"blocks.{index}.conv", after, before, kernel)
        weights += [convolution, *_norm(f"blocks.{index}.norm", after)]
        flops.append(2 * convolution.numel * height * width)
        height, width = height // 2, width // 2
    if model["_target_"] == SegmenterConfig._target_:
        outputs = classes * 4 ** len(channels)
        head = _convolution("head.output", outputs, channels[-1], 1)
        ends = [head, Weight("head.output.bias", (outputs,), casts=False)]
        positions = height * width
    else:
        head = Weight("head.output.weight", (classes, channels[-1]), 0)
        ends = [head, Weight("head.output.bias", (classes,), 0, casts=False)]
        positions = 1
    costs = PartFlops(stem=0, blocks=tuple(flops), head=2 * positions * head.numel)
    return ModelWeights((*weights, *ends), {}, costs)


def _unet(model: Mapping[str, Any], sample_shape: tuple[int, ...]) -> ModelWeights:
    _, height, width = sample_shape
    channels, kernel = list(model["channels"]), model["kernel_size"]
    positions = height * width

    def twice(at: str, before: int, after: int) -> list[Weight]:
        return [
            _convolution(f"{at}.twice.conv1", after, before, kernel), *_norm(f"{at}.twice.norm1", after),
            _convolution(f"{at}.twice.conv2", after, after, kernel), *_norm(f"{at}.twice.norm2", after),
        ]  # fmt: skip

    blocks: list[list[Weight]] = []
    flops: list[int] = []

    def add(weights: list[Weight]) -> None:
        blocks.append(weights)
        flops.append(2 * positions * sum(weight.numel for weight in weights if len(weight.shape) > 1))

    for before, after in pairwise([model["in_channels"], *channels[:-1]]):
        add(twice(f"blocks.{len(blocks)}", before, after))
        positions //= 4
    add(twice(f"blocks.{len(blocks)}", [model["in_channels"], *channels][-2], channels[-1]))
    for level, below in reversed(list(pairwise(channels))):
        positions *= 4
        at = f"blocks.{len(blocks)}"
        narrow = _convolution(f"{at}.narrow", level, below, kernel)
        add([narrow, Weight(f"{at}.narrow.bias", (level,), casts=False), *twice(at, 2 * level, level)])
    head = _convolution("head", model["classes"], channels[0], 1)
    ends = [head, Weight("head.bias", (model["classes"],), casts=False)]
    costs = PartFlops(stem=0, blocks=tuple(flops), head=2 * height * width * head.numel)
    return ModelWeights((*(weight for block in blocks for weight in block), *ends), {}, costs)


_LISTS: dict[Any, Callable[[Mapping[str, Any], tuple[int, ...]], ModelWeights | None]] = {
    TransformerConfig._target_: _decoder,
    MoeTransformerConfig._target_: _decoder,
    HuggingFaceConfig._target_: _llama,
    ConvNetConfig._target_: _convnet,
    SegmenterConfig._target_: _convnet,
    UNetConfig._target_: _unet,
}
