"""The keys of each model and each data set; `schema.py` says how its comments are used."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from omegaconf import MISSING

from hpc_parallel.rules import Rule, above, at_least, count, inside, key, one_of

SEQUENCE = count(most=2**31)
HELD_OUT = replace(inside(0, 0.5), legal=(0.05,))
CHANNELS = Rule(
    lambda numbers: bool(numbers) and all(isinstance(size, int) and size >= 1 for size in numbers),
    "needs a number above 0 for each block",
    legal=([16, 32],),
)


@dataclass
class TransformerConfig:
    """Shape of the reference decoder (`models/transformer.py`)."""

    _target_: str = "hpc_parallel.models.transformer.Transformer"  # The class of the model.
    layers: int = key(MISSING, count())  # The number of blocks.
    dim: int = key(MISSING, count())  # The width of the model.
    heads: int = key(MISSING, count())  # The number of attention heads.
    # The number of key-value heads (grouped-query attention); it divides `heads`.
    kv_heads: int = key(MISSING, count())
    ffn_dim: int = key(MISSING, count())  # The inner width of the feed-forward layers.
    vocab_size: int = key(MISSING, count(), legal=256)  # The number of tokens in the vocabulary.
    tied_head: bool = True  # The head uses the weight of the embedding.
    rope_theta: float = key(10000.0, above(0))  # The base of the rotary positions.
    norm_eps: float = key(1e-5, above(0))  # The epsilon of RMSNorm.
    head_dim: int | None = key(None, count())  # The width of a head, an even number; null: `dim / heads`.
    qk_norm: bool = False  # Each head's queries and keys pass an RMSNorm before their rotation.


@dataclass
class MoeTransformerConfig(TransformerConfig):
    """The reference decoder with a mixture of experts in each block (`models/moe.py`)."""

    _target_: str = "hpc_parallel.models.moe.MoeTransformer"  # The class of the model.
    # The number of experts in each block; `ffn_dim` is the width of one.
    experts: int = key(MISSING, count())
    experts_per_token: int = 2  # The number of experts that each token uses.
    balance: float = key(0.01, at_least(0))  # The weight of the loss that balances the experts' use.
    renormalise: bool = False  # The gates of a token's experts are divided by their sum.
    # How the router's outputs become gates: probabilities of all experts, or of each expert by itself.
    gate: str = key("softmax", one_of("softmax", "sigmoid"))
    # The number of experts that every token uses, beside `experts`.
    shared_experts: int = key(0, at_least(0))
    # The step of each expert's bias against its load after each update; 0: no bias. Needs no `balance`.
    balance_step: float = key(0.0, at_least(0))
    # The number of first blocks that have one feed-forward network instead of experts.
    dense_layers: int = key(0, at_least(0))
    # The inner width of their feed-forward network; null: `ffn_dim`.
    dense_ffn_dim: int | None = key(None, count())


@dataclass
class HuggingFaceConfig:
    """A causal language model of the library transformers (`models/huggingface.py`)."""

    _target_: str = "hpc_parallel.models.huggingface.HuggingFaceModel"  # The class of the model.
    _convert_: str = "all"  # Hydra hands plain tables and lists to the library.
    config: dict[str, Any] = field(default_factory=dict)  # `model_type`, and keys of its configuration.


@dataclass
class ConvNetConfig:
    """Shape of the reference convnet (`models/convnet.py`): one label for each image."""

    _target_: str = "hpc_parallel.models.convnet.ConvNet"  # The class of the model.
    # The channels of each block.
    channels: list[int] = key([16, 32, 128, 256, 512], CHANNELS)
    classes: int = key(10, at_least(1))  # The number of labels.
    in_channels: int = key(1, at_least(1))  # The number of channels of an image.
    kernel_size: int = key(3, at_least(1))  # The width of the convolutions in pixels, an odd number.


@dataclass
class SegmenterConfig(ConvNetConfig):
    """The same blocks with one label for each pixel."""

    _target_: str = "hpc_parallel.models.convnet.Segmenter"  # The class of the model.
    channels: list[int] = key([16, 32, 128], CHANNELS)  # The channels of each block.
    classes: int = 2  # The number of labels.


@dataclass
class UNetConfig(ConvNetConfig):
    """A U-Net (`models/unet.py`): one label for each pixel, with skip connections."""

    _target_: str = "hpc_parallel.models.unet.UNet"  # The class of the model.
    # The channels of each level; each level but the last halves the image.
    channels: list[int] = key([16, 32, 64, 128], CHANNELS)
    classes: int = 2  # The number of labels.


@dataclass
class TextDataConfig:
    """Bytes of text files; the source of Python's standard library unless `path` names other files."""

    _target_: str = "hpc_parallel.data.text.TextData"  # The class of the data.
    path: str | None = None  # A folder of text files, or one file; null: Python's standard library.
    pattern: str = "*.py"  # The names of the files that are read in a folder.
    sequence_length: int = key(128, SEQUENCE)  # Tokens in one sample.
    max_bytes: int = key(6_000_000, count())  # The number of bytes that are read at most.
    validation_share: float = key(0.05, HELD_OUT)  # The share of the files that is held out for validation.


@dataclass
class TokensDataConfig:
    """A file of token ids made by `python -m hpc_parallel tokenize`."""

    _target_: str = "hpc_parallel.data.tokens.TokensData"  # The class of the data.
    path: str = MISSING  # The `.npy` file.
    sequence_length: int = key(1024, SEQUENCE)  # Tokens in one sample.
    # The share of the tokens, at the end, that is held out for validation.
    validation_share: float = key(0.05, HELD_OUT)
    # Samples have whole documents, which do not see each other; each ends with `separator`.
    packing: bool = False
    separator: int | None = key(None, at_least(0))  # The token that ends each document; only with `packing`.


@dataclass
class DigitsDataConfig:
    """The handwritten digits of scikit-learn, 8 x 8 pixels, repeated over a larger canvas."""

    _target_: str = "hpc_parallel.data.images.DigitsData"  # The class of the data.
    height: int = key(32, at_least(1))  # The height of an image in pixels, a multiple of 8.
    width: int = key(32, at_least(1))  # The width of an image in pixels, a multiple of 8.
    # The share of the images, at the end, that is held out for validation.
    validation_share: float = key(0.1, HELD_OUT)


@dataclass
class CellsDataConfig:
    """Drawn cells with masks, made on each device as they are needed."""

    _target_: str = "hpc_parallel.data.images.CellsData"  # The class of the data.
    height: int = key(64, at_least(1))  # The height of an image in pixels.
    width: int = key(64, at_least(1))  # The width of an image in pixels.
    # The number of training images; a tenth as many are held out for validation.
    samples: int = key(4096, at_least(1))
    seed: int = 0  # The seed of the drawing.


@dataclass
class DatasetDataConfig:
    """Samples of your own: an object with `__len__` and `__getitem__`, which returns (input, target)."""

    _target_: str = "hpc_parallel.data.dataset.DatasetData"  # The class of the data.
    _convert_: str = "all"  # Hydra hands plain tables and lists to your class.
    # `_target_`, the class of your dataset, and its arguments.
    dataset: dict[str, Any] = field(default_factory=lambda: {"_target_": MISSING})
    # The same for a dataset of held-out samples; empty: a share of `dataset` is held out.
    validation: dict[str, Any] | None = field(default_factory=dict)
    # The share of the samples that is held out, chosen by a fixed shuffle.
    validation_share: float = key(0.05, HELD_OUT)
    sequence_length: int | None = key(None, SEQUENCE)  # Tokens in one sample, if the samples are tokens.
    # The number of tokens in the vocabulary, if the samples are tokens.
    vocab_size: int | None = key(None, count(), legal=256)
    # Samples of `sequence_length` have whole documents, which do not see each other; `dataset` has documents.
    packing: bool = False


@dataclass
class ParquetDataConfig:
    """A folder of parquet or Arrow files (`pip install ".[datasets]"`)."""

    _target_: str = "hpc_parallel.data.parquet.ParquetData"  # The class of the data.
    path: str = MISSING  # A folder of `.parquet` or of `.arrow` files, or one file.
    input: str = "input_ids"  # The column of the inputs.
    # The column of the targets; null: `input` has token ids, and all rows in their order are one text.
    target: str | None = None
    sequence_length: int | None = key(None, SEQUENCE)  # Tokens in one sample; needed for token ids.
    # The number of tokens in the vocabulary; needed for token ids.
    vocab_size: int | None = key(None, count(), legal=256)
    # The share of the rows, or of the tokens at the end, that is held out.
    validation_share: float = key(0.05, HELD_OUT)
    packing: bool = False  # Samples have whole documents, which do not see each other; each row is one.


@dataclass
class OwnDataConfig(DatasetDataConfig):
    """The keys that are checked for data of a user's own class."""

    max_bytes: int | None = key(None, count())


# The classes of the files in `conf/model` and `conf/data`, by the names of their schemas.
MODELS: dict[str, type[Any]] = {
    "transformer": TransformerConfig, "moe": MoeTransformerConfig, "huggingface": HuggingFaceConfig,
    "convnet": ConvNetConfig, "segmenter": SegmenterConfig, "unet": UNetConfig,
}  # fmt: skip
DATA: dict[str, type[Any]] = {
    "text": TextDataConfig, "tokens": TokensDataConfig, "digits": DigitsDataConfig, "cells": CellsDataConfig,
    "dataset": DatasetDataConfig, "parquet": ParquetDataConfig,
}  # fmt: skip
_BY_CLASS = {schema._target_: schema for schema in (*MODELS.values(), *DATA.values())}


def schema_of(group: str, target: Any) -> type | None:
    """The class with the keys of `model` or `data` whose `_target_` is given; None if it is not known.

    Data of a user's own class may have the keys that every data set has.
    """
    return _BY_CLASS.get(str(target), OwnDataConfig if group == "data" else None)
