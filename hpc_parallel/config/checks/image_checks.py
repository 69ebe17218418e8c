"""Check images: canvas, network and grid of tiles must fit together."""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any

from hpc_parallel.config.checks.layout_checks import along_with_less_of
from hpc_parallel.config.layout import Layout, divisors, layout_of, tile_grid
from hpc_parallel.config.schema import (
    CellsDataConfig,
    ConvNetConfig,
    DigitsDataConfig,
    HuggingFaceConfig,
    RunConfig,
    SegmenterConfig,
    TextDataConfig,
    TokensDataConfig,
    TransformerConfig,
)
from hpc_parallel.problems import Found, Problem

TOKENS = {"text": TextDataConfig._target_, "tokens": TokensDataConfig._target_}
# The data that our models train on, by class path. A user's class may take any data.
FITTING = {
    TransformerConfig._target_: TOKENS,
    HuggingFaceConfig._target_: TOKENS,
    ConvNetConfig._target_: {"digits": DigitsDataConfig._target_},
    SegmenterConfig._target_: {"cells": CellsDataConfig._target_},
}
SCHEMAS: tuple[type[Any], ...] = (ConvNetConfig, SegmenterConfig, DigitsDataConfig, CellsDataConfig)
CLASSES = {DigitsDataConfig._target_: 10, CellsDataConfig._target_: 2}
APART = ("shard", "context", "tensor")  # axes that can't be combined with tiles yet


def find_problems(config: RunConfig) -> Found:
    model, data = (part if isinstance(part, dict) else {} for part in (config.model, config.data))
    yield from _fit(model, data)
    broken = False
    for group, table in (("model", model), ("data", data)):
        schema = next((schema for schema in SCHEMAS if schema._target_ == table.get("_target_")), None)
        for name, value in table.items():
            if schema is not None and name != "seed" and isinstance(value, int) and value < 1:
                broken = True
                yield Problem(f"{group}.{name}", value, "must be at least 1", (getattr(schema, name),))
    channels = model.get("channels") if _is_convnet(model) else None
    if channels is not None and (not channels or min(channels) < 1):
        broken = True
        yield Problem("model.channels", channels, "needs a number above 0 for each block", ([16, 32],))
    if not broken:
        yield from _network(model, data)
        yield from _axes(config, model, data)


def _is_convnet(model: dict[str, Any]) -> bool:
    return model.get("_target_") in (ConvNetConfig._target_, SegmenterConfig._target_)


def _fit(model: dict[str, Any], data: dict[str, Any]) -> Found:
    our_data = {target for fitting in FITTING.values() for target in fitting.values()}
    required = FITTING.get(model.get("_target_", ""))
    target = data.get("_target_")
    if required and target in our_data and target not in required.values():
        others = [name for fitting in FITTING.values() for name, path in fitting.items() if path == target]
        kind = model["_target_"].rpartition(".")[2]
        yield Problem("data", others[0], f"is not data that a {kind} can train on", tuple(required))
    if target == DigitsDataConfig._target_ and find_spec("sklearn") is None:
        yield "data = digits needs scikit-learn, which is not installed here (pip install scikit-learn)."


def _network(model: dict[str, Any], data: dict[str, Any]) -> Found:
    if data.get("_target_") == DigitsDataConfig._target_:
        for side in ("height", "width"):
            if data[side] % 8:
                rule = "is not a multiple of 8, the side of a digit"
                yield Problem(f"data.{side}", data[side], rule, _multiples(data[side], 8))
    if not _is_convnet(model):
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


def _axes(config: RunConfig, model: dict[str, Any], data: dict[str, Any]) -> Found:
    """Tiles must split images, and the context axis must split text."""
    try:
        layout = layout_of(config.strategy, devices=config.devices)
    except (ValueError, ZeroDivisionError):
        return
    if layout.context > 1 and _is_convnet(model):
        rule = "splits sequences, and the model reads images"
        along = along_with_less_of("context", config.strategy)
        yield Problem("strategy.context", layout.context, rule, (1,), along)
    yield from _tiles(config, layout, model, data)
    yield from _tensor(config, layout, model)


def _tiles(config: RunConfig, layout: Layout, model: dict[str, Any], data: dict[str, Any]) -> Found:
    """Each tile needs a position on every feature map, and whole pixels for each of its positions."""
    strategy = config.strategy
    degree = layout.tile
    if strategy.tile_grid is not None and (
        len(strategy.tile_grid) != 2 or min(strategy.tile_grid) < 1 or math.prod(strategy.tile_grid) != degree
    ):
        rule = f"is not a grid [rows,columns] of {degree} tiles"
        legal = [[rows, degree // rows] for rows in divisors(degree)]
        yield Problem("strategy.tile_grid", strategy.tile_grid, rule, tuple(legal[:3]))
        return
    if degree > 1 and FITTING.get(str(model.get("_target_"))) is TOKENS:
        along = along_with_less_of("tile", strategy)
        yield Problem("strategy.tile", degree, "splits images, and the model reads text", (1,), along)
        return
    for axis in APART:
        if degree > 1 and (size := getattr(layout, axis)) > 1:
            along = along_with_less_of(axis, strategy)
            yield Problem(f"strategy.{axis}", size, "can't be combined with tiles", (1,), along)
    if not _is_convnet(model) or "height" not in data:
        return
    blocks = len(model["channels"])
    grid = tile_grid(degree, strategy.tile_grid)
    for side, parts in zip(("height", "width"), grid, strict=True):
        size, unit = data[side], parts * 2**blocks
        if model["_target_"] == SegmenterConfig._target_ and size % unit:
            rule = f"does not divide by {parts} tiles x 2^{blocks} for the halvings of {blocks} blocks"
            yield Problem(f"data.{side}", size, rule, _multiples(size, unit))
        elif size < unit:
            rule = f"is too small for {parts} tiles and {blocks} blocks, which each halve it"
            yield Problem(f"data.{side}", size, rule, (unit,))


def _tensor(config: RunConfig, layout: Layout, model: dict[str, Any]) -> Found:
    """Only the classifier is split, by its logits."""
    degree = layout.tensor
    if degree == 1 or not _is_convnet(model):
        return
    if model["_target_"] == SegmenterConfig._target_:
        rule = "splits linear layers, and a Segmenter has none"
        yield Problem("strategy.tensor", degree, rule, (1,), along_with_less_of("tensor", config.strategy))
    elif model["classes"] % degree:
        rule = f"does not divide by strategy.tensor = {degree}: each device has the same number of logits"
        yield Problem("model.classes", model["classes"], rule, (-(-model["classes"] // degree) * degree,))


def _multiples(value: int, unit: int) -> tuple[int, ...]:
    below = value // unit * unit
    return (below, below + unit) if below else (unit,)
