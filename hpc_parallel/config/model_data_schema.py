"""The keys of each model and each data set; `schema.py` says how its comments are used."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class TransformerConfig:
    """Shape of the reference decoder (`models/transformer.py`)."""

    _target_: str = "hpc_parallel.models.transformer.Transformer"  # The class of the model.
    layers: int = MISSING  # The number of blocks.
    dim: int = MISSING  # The width of the model.
    heads: int = MISSING  # The number of attention heads.
    kv_heads: int = MISSING  # The number of key-value heads (grouped-query attention); it divides `heads`.
    ffn_dim: int = MISSING  # The inner width of the feed-forward layers.
    vocab_size: int = MISSING  # The number of tokens in the vocabulary.
    tied_head: bool = True  # The head uses the weight of the embedding.
    rope_theta: float = 10000.0  # The base of the rotary positions.
    norm_eps: float = 1e-5  # The epsilon of RMSNorm.


@dataclass
class MoeTransformerConfig(TransformerConfig):
    """The reference decoder with a mixture of experts in each block (`models/moe.py`)."""

    _target_: str = "hpc_parallel.models.moe.MoeTransformer"  # The class of the model.
    experts: int = MISSING  # The number of experts in each block; `ffn_dim` is the width of one.
    experts_per_token: int = 2  # The number of experts that each token uses.
    balance: float = 0.01  # The weight of the loss that balances the experts' use.


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
    channels: list[int] = field(default_factory=lambda: [16, 32, 128, 256, 512])
    classes: int = 10  # The number of labels.
    in_channels: int = 1  # The number of channels of an image.
    kernel_size: int = 3  # The width of the convolutions in pixels, an odd number.


@dataclass
class SegmenterConfig(ConvNetConfig):
    """The same blocks with one label for each pixel."""

    _target_: str = "hpc_parallel.models.convnet.Segmenter"  # The class of the model.
    channels: list[int] = field(default_factory=lambda: [16, 32, 128])  # The channels of each block.
    classes: int = 2  # The number of labels.


@dataclass
class UNetConfig(ConvNetConfig):
    """A U-Net (`models/unet.py`): one label for each pixel, with skip connections."""

    _target_: str = "hpc_parallel.models.unet.UNet"  # The class of the model.
    # The channels of each level; each level but the last halves the image.
    channels: list[int] = field(default_factory=lambda: [16, 32, 64, 128])
    classes: int = 2  # The number of labels.


@dataclass
class TextDataConfig:
    """Bytes of text files; the source of Python's standard library unless `path` names other files."""

    _target_: str = "hpc_parallel.data.text.TextData"  # The class of the data.
    path: str | None = None  # A folder of text files, or one file; null: Python's standard library.
    pattern: str = "*.py"  # The names of the files that are read in a folder.
    sequence_length: int = 128  # Tokens in one sample.
    max_bytes: int = 6_000_000  # The number of bytes that are read at most.
    validation_share: float = 0.05  # The share of the files that is held out for validation.


@dataclass
class TokensDataConfig:
    """A file of token ids made by `python -m hpc_parallel tokenize`."""

    _target_: str = "hpc_parallel.data.tokens.TokensData"  # The class of the data.
    path: str = MISSING  # The `.npy` file.
    sequence_length: int = 1024  # Tokens in one sample.
    validation_share: float = 0.05  # The share of the tokens, at the end, that is held out for validation.


@dataclass
class DigitsDataConfig:
    """The handwritten digits of scikit-learn, 8 x 8 pixels, repeated over a larger canvas."""

    _target_: str = "hpc_parallel.data.images.DigitsData"  # The class of the data.
    height: int = 32  # The height of an image in pixels, a multiple of 8.
    width: int = 32  # The width of an image in pixels, a multiple of 8.
    validation_share: float = 0.1  # The share of the images, at the end, that is held out for validation.


@dataclass
class CellsDataConfig:
    """Drawn cells with masks, made on each device as they are needed."""

    _target_: str = "hpc_parallel.data.images.CellsData"  # The class of the data.
    height: int = 64  # The height of an image in pixels.
    width: int = 64  # The width of an image in pixels.
    samples: int = 4096  # The number of training images; a tenth as many are held out for validation.
    seed: int = 0  # The seed of the drawing.


@dataclass
class DatasetDataConfig:
    """Samples of your own: an object with `__len__` and `__getitem__`, which returns (input, target)."""

    _target_: str = "hpc_parallel.data.dataset.DatasetData"  # The class of the data.
    _convert_: str = "all"  # Hydra hands plain tables and lists to your class.
    # `_target_`, the class of your dataset, and its arguments.
    dataset: dict[str, Any] = field(default_factory=lambda: {"_target_": MISSING})
    # The same for a dataset of held-out samples; null: a share of `dataset` is held out.
    validation: dict[str, Any] | None = None
    validation_share: float = 0.05  # The share of the samples that is held out, chosen by a fixed shuffle.
    sequence_length: int | None = None  # Tokens in one sample, if the samples are tokens.
    vocab_size: int | None = None  # The number of tokens in the vocabulary, if the samples are tokens.


@dataclass
class ParquetDataConfig:
    """A folder of parquet or Arrow files (`pip install ".[datasets]"`)."""

    _target_: str = "hpc_parallel.data.parquet.ParquetData"  # The class of the data.
    path: str = MISSING  # A folder of `.parquet` or of `.arrow` files, or one file.
    input: str = "input_ids"  # The column of the inputs.
    # The column of the targets; null: `input` has token ids, and all rows in their order are one text.
    target: str | None = None
    sequence_length: int | None = None  # Tokens in one sample; needed for token ids.
    vocab_size: int | None = None  # The number of tokens in the vocabulary; needed for token ids.
    validation_share: float = 0.05  # The share of the rows, or of the tokens at the end, that is held out.
