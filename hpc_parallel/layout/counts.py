"""What the configuration says of a model and its data: class, samples, numbers of blocks, heads, tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpc_parallel.layout.model_data_schema import (
    ConvNetConfig,
    HuggingFaceConfig,
    MoeTransformerConfig,
    SegmenterConfig,
    TransformerConfig,
    UNetConfig,
)

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
