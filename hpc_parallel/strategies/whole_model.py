"""Builds the whole model of a configuration on meta, before it is split."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from hydra.utils import get_object
from torch import nn

from hpc_parallel.config.build import build
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.data.generators import seeded
from hpc_parallel.models.layered import LayeredModel, with_ties
from hpc_parallel.models.plain import plain_model
from hpc_parallel.user_code import UserCodeError


def build_model(config: RunConfig) -> LayeredModel:
    """The whole model of `config`, on meta. Raises ConfigError with the error of its class."""
    return build_whole(config.model, seed=config.seed)


def build_whole(table: Mapping[str, Any], *, seed: int) -> LayeredModel:
    """The model that `table` describes, on meta.

    A LayeredModel is built without memory. A plain nn.Module is built on the CPU, as its author knows it, and
    keeps the values that its constructor draws under `seed`: the same on every rank.

    Raises ConfigError if the class can't be built, or has no loss.
    """
    if not _is_plain(table["_target_"]):
        with torch.device("meta"):
            built = _built(table)
        if isinstance(built, LayeredModel):
            return with_ties(built)
    with seeded(seed), torch.device("cpu"):
        module = build(table, key="model")
    kind = type(module)
    if not isinstance(module, nn.Module):
        raise UserCodeError([f"{table['_target_']} (model) is a {kind.__name__}, not a torch.nn.Module."])
    if not callable(getattr(kind, "loss", None)):
        raise UserCodeError([
            f"{kind.__name__} (model) has no loss: define its method loss(output, target), which returns the "
            "SUM of the loss terms, as F.cross_entropy(output, target, reduction='sum') does."
        ])  # fmt: skip
    return plain_model(module)


def _built(table: Mapping[str, Any]) -> Any:
    try:
        return build(table, key="model")
    except UserCodeError as error:
        if "meta tensor" not in str(error):
            raise
        advice = (
            "A model is built without memory (on meta). Build what needs numbers under "
            '`with torch.device("cpu"):`'
        )
        raise UserCodeError([f"{error}. {advice}."]) from error


def _is_plain(target: str) -> bool:
    """Whether `target` is a class of modules that knows nothing of this package."""
    try:
        kind = get_object(target)
    except Exception:  # of any kind: `build` reports it
        return False
    return isinstance(kind, type) and issubclass(kind, nn.Module) and not issubclass(kind, LayeredModel)
