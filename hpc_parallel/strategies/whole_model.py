"""Builds the whole model of a configuration on meta, before it is split."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from hydra.utils import get_object
from torch import Tensor, nn

from hpc_parallel.config.build import build
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.data.generators import seeded
from hpc_parallel.models.layered import LayeredModel, with_ties
from hpc_parallel.models.plain import plain_model
from hpc_parallel.strategies import packed_documents
from hpc_parallel.torch_internals import LocalBatchNorm, has_hooks
from hpc_parallel.user_code import UserCodeError


class NeedsNumbersError(UserCodeError):
    """A constructor or function computes with numbers, which tensors on meta do not have."""


def build_model(config: RunConfig) -> LayeredModel:
    """The whole model of `config`, on meta. Raises ConfigError with the error of the model's class."""
    return packed_documents.apply(build_whole(config.model, seed=config.seed), config=config)


def build_whole(table: Mapping[str, Any], *, seed: int) -> LayeredModel:
    """The model that `table` describes, on meta.

    A LayeredModel is built without memory. A plain nn.Module is built on the CPU, as its author expects. It
    keeps the values that its constructor draws under `seed`, which are the same on every rank. A function is
    called on meta, and again on the CPU if it needs numbers or returns a plain module.
    SyncBatchNorm becomes BatchNorm: the layout decides which ranks share a microbatch (`batch_norm.py`), not
    the default process group, which has the other stages too. DDP refuses its class on CPUs.

    Raises ConfigError if the class can't be built, has no loss, has a subclass of SyncBatchNorm, a complex
    weight or a weight with a hook, or computes a tensor from weights in its constructor.
    """
    model = _built(table, seed=seed)
    for module in model.modules():
        if type(module) is nn.SyncBatchNorm:
            module.__class__ = LocalBatchNorm  # type: ignore[assignment]
        elif isinstance(module, nn.SyncBatchNorm):
            rule = "is a subclass of SyncBatchNorm. Derive it from BatchNorm2d."
            raise UserCodeError([f"{type(module).__name__} (model) {rule}"])
    return model


def _built(table: Mapping[str, Any], *, seed: int) -> LayeredModel:
    target = _imported(table["_target_"])
    if not _is_class(target, nn.Module) or _is_class(target, LayeredModel):
        try:
            built = _built_on_meta(table)
        except NeedsNumbersError:
            if _is_class(target, LayeredModel):
                raise
        else:
            if isinstance(built, LayeredModel):
                _require_plain_weights(built)
                return with_ties(built)
    with seeded(seed), torch.device("cpu"):
        module = build(table, key="model")
    if isinstance(module, LayeredModel):
        _built_on_meta(table)  # raises the error of the first try again
    kind = type(module)
    if not isinstance(module, nn.Module):
        raise UserCodeError([f"{table['_target_']} (model) is a {kind.__name__}, not a torch.nn.Module."])
    if not callable(getattr(kind, "loss", None)):
        raise UserCodeError([
            f"{kind.__name__} (model) has no loss: define its method loss(output, target), which returns the "
            "SUM of the loss terms, as F.cross_entropy(output, target, reduction='sum') does."
        ])  # fmt: skip
    _require_plain_weights(module)
    return plain_model(module)


def _require_plain_weights(model: nn.Module) -> None:
    """Refuse what would be lost, because weights get their memory after the constructor."""
    kind = type(model).__name__
    for name, weight in model.named_parameters():
        if weight.is_complex() and weight.requires_grad:
            rule = (
                f"is a weight of {weight.dtype}, which is not supported. Keep its two real parts as a weight"
            )
            advice = f"{[*weight.shape, 2]}, and use torch.view_as_complex(weight) in the forward pass"
            raise UserCodeError([f"{kind}.{name} (model) {rule} {advice}."])
        if has_hooks(weight):
            rule = "has a hook, which would be lost: weights get their memory after the constructor"
            advice = "Change its gradient in the forward pass, or in a hook of the module that owns it"
            raise UserCodeError([f"{kind}.{name} (model) {rule}. {advice}."])
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                rule = "is computed from weights, which get their values after the constructor. Compute it in"
                advice = "the forward pass; torch.nn.utils.parametrizations.weight_norm does so."
                raise UserCodeError([f"{kind}.{path}.{name} (model) {rule} {advice}"])


def build_small_sizes(table: Mapping[str, Any], *, seed: int) -> LayeredModel:
    """Call `build_whole` with the arguments in the attribute `small` of the class or function, if it has one.

    `small` is read before a class is built, because a plain module is built with all its weights.
    """
    small = getattr(_imported(table["_target_"]), "small", None)
    if not small or not isinstance(small, Mapping):  # the constructor may set `small` instead
        model = build_whole(table, seed=seed)
        if not model.small:
            return model
        small = model.small
    return build_whole({**table, **small}, seed=seed)


def _built_on_meta(table: Mapping[str, Any]) -> Any:
    try:
        with torch.device("meta"):
            return build(table, key="model")
    except UserCodeError as error:
        if not re.search(r"\bmeta (tensor|device)", str(error), re.IGNORECASE):
            raise
        advice = (
            "A model is built without memory (on meta). Build what needs numbers under "
            '`with torch.device("cpu"):`'
        )
        raise NeedsNumbersError([f"{error}. {advice}."]) from error


def _imported(target: str) -> Any:
    """The class or function at the path `target`; None if it can't be imported, which `build` reports."""
    try:
        return get_object(target)
    except Exception:  # the user's code may raise any exception
        return None


def _is_class(target: Any, base: type) -> bool:
    return isinstance(target, type) and issubclass(target, base)
