"""Check that model and data fit together, and the sizes of images and of their networks."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from hpc_parallel.config.checks.key_checks import sizes_are_legal
from hpc_parallel.config.checks.suggestions import multiples_near
from hpc_parallel.config.model_data_schema import (
    CellsDataConfig,
    ConvNetConfig,
    DigitsDataConfig,
    HuggingFaceConfig,
    MoeTransformerConfig,
    SegmenterConfig,
    TextDataConfig,
    TokensDataConfig,
    TransformerConfig,
    UNetConfig,
)
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.problems import Problem, Problems

TOKENS = {"text": TextDataConfig._target_, "tokens": TokensDataConfig._target_}
# The data that our models train on, by class path. A user's class may take any data.
FITTING = {
    TransformerConfig._target_: TOKENS,
    MoeTransformerConfig._target_: TOKENS,
    HuggingFaceConfig._target_: TOKENS,
    ConvNetConfig._target_: {"digits": DigitsDataConfig._target_},
    SegmenterConfig._target_: {"cells": CellsDataConfig._target_},
    UNetConfig._target_: {"cells": CellsDataConfig._target_},
}
NETWORKS = (ConvNetConfig._target_, SegmenterConfig._target_, UNetConfig._target_)
CLASSES = {DigitsDataConfig._target_: 10, CellsDataConfig._target_: 2}


def find_problems(config: RunConfig) -> Problems:
    model, data = (part if isinstance(part, dict) else {} for part in (config.model, config.data))
    yield from _fit(model, data)
    if sizes_are_legal(config):
        yield from _network(model, data)


def is_convnet(model: Any) -> bool:
    """Whether the model is one of our models of images."""
    target = model.get("_target_") if isinstance(model, dict) else None
    return target in NETWORKS


def halvings(model: dict[str, Any]) -> int:
    """How often a model of ours halves an image."""
    levels = len(model["channels"])
    return levels - 1 if model["_target_"] == UNetConfig._target_ else levels


def reads(model: Any) -> str | None:
    """The kind of samples that a model reads, `text` or `images`; None for a user's class."""
    if is_convnet(model):
        return "images"
    target = model.get("_target_") if isinstance(model, dict) else None
    return "text" if FITTING.get(str(target)) is TOKENS else None


def _fit(model: dict[str, Any], data: dict[str, Any]) -> Problems:
    our_data = {target for fitting in FITTING.values() for target in fitting.values()}
    required = FITTING.get(model.get("_target_", ""))
    target = data.get("_target_")
    if required and target in our_data and target not in required.values():
        others = [name for fitting in FITTING.values() for name, path in fitting.items() if path == target]
        kind = model["_target_"].rpartition(".")[2]
        yield Problem("data", others[0], f"is not data that a {kind} can train on", tuple(required))
    if target == DigitsDataConfig._target_ and find_spec("sklearn") is None:
        yield "data = digits needs scikit-learn, which is not installed here (pip install scikit-learn)."


def _network(model: dict[str, Any], data: dict[str, Any]) -> Problems:
    if data.get("_target_") == DigitsDataConfig._target_:
        for side in ("height", "width"):
            if data[side] % 8:
                rule = "is not a multiple of 8, the side of a digit"
                yield Problem(f"data.{side}", data[side], rule, multiples_near(data[side], 8))
    if not is_convnet(model):
        return
    if model["kernel_size"] % 2 == 0:
        rule = "must be odd, or each block would shift the image"
        legal = (model["kernel_size"] - 1, model["kernel_size"] + 1)
        yield Problem("model.kernel_size", model["kernel_size"], rule, legal)
    if data.get("_target_") not in CLASSES:
        return
    if model["in_channels"] != 1:
        yield Problem("model.in_channels", model["in_channels"], "does not fit grey images", (1,))
    least = CLASSES[data["_target_"]]
    if model["classes"] < least:
        yield Problem("model.classes", model["classes"], f"is less than the {least} of the data", (least,))
