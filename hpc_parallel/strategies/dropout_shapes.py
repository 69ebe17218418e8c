"""The shapes that dropout layers get in the whole model, and random operations that dropout can't replace.

A forward pass on meta tensors, in training mode, shows both; nothing is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.problems import Problems
from hpc_parallel.torch_internals import DispatchMode, operator_arguments, operator_name

ELEMENTWISE = (nn.Dropout,)
CHANNELWISE = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
UNSUPPORTED = (nn.AlphaDropout, nn.FeatureAlphaDropout)
BATCH = 3  # samples of the pass: more than one for BatchNorm, and rarely the size of another dim
INPUT_TYPES = (torch.int64, torch.uint8, torch.float32)  # tokens, pixels, numbers


@dataclass(frozen=True)
class WholeShape:
    """The shape of one sample in the input of a dropout of the whole model.

    name: of the model's class and of the layer; sizes: without the dim of the samples; sequence_dim: the dim
    of the input (with that of the samples) that has the positions of a sequence, if there is one.
    """

    name: str
    sizes: tuple[int, ...]
    sequence_dim: int | None


@dataclass
class Pass:
    """What one forward pass showed. random: clauses about operations that draw random numbers."""

    inputs: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    random: list[str] = field(default_factory=list)


def dropouts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The dropout layers of `model` that drop anything, by name."""
    for name, module in model.named_modules():
        if isinstance(module, (*ELEMENTWISE, *CHANNELWISE)) and module.p > 0:
            yield name, module


def whole_shapes(model: LayeredModel, *, sample_shape: tuple[int, ...]) -> dict[str, WholeShape]:
    """The shape of the input of each dropout in the whole `model`, on meta, if it can be known.

    A layer without a shape draws from the generator of the device.
    """
    names = [name for name, _ in dropouts(model)]
    if not names:
        return {}
    full = dry_pass(model, sample_shape=sample_shape)
    half = full
    if full is not None and len(sample_shape) == 1 and sample_shape[0] > 1:
        half = dry_pass(model, sample_shape=(sample_shape[0] // 2,))
    if full is None or half is None:
        return {}
    label = type(model).__name__
    shapes = {
        name: _shape(f"{label}.{name}", full.inputs.get(name, []), half.inputs.get(name, []))
        for name in names
    }
    return {name: shape for name, shape in shapes.items() if shape is not None}


def find_problems(model: LayeredModel, *, sample_shape: tuple[int, ...]) -> Problems:
    """Returns why the whole `model` would draw other random numbers on several devices than on one."""
    label = type(model).__name__
    for name, module in model.named_modules():
        if isinstance(module, UNSUPPORTED) and module.p > 0:
            yield _other(f"{label}.{name} is {module}", "Use nn.Dropout, set its probability to 0")
            return
    shown = dry_pass(model, sample_shape=sample_shape)
    if shown is not None and shown.random:
        yield _other(f"{label}.{shown.random[0]}", "Use a module nn.Dropout there, set its probability to 0")
        return
    shapes = whole_shapes(model, sample_shape=sample_shape)
    for name, module in dropouts(model):
        if name not in shapes:
            reason = (
                f"{label}.{name} is {module}, and which elements of a sample it gets is not known: it must "
                "be called once in a forward pass, with the samples as the first dim, on meta tensors too"
            )
            yield _other(reason, "Set its probability to 0")
            return


def _other(reason: str, advice: str) -> str:
    return (
        f"{reason}: it would draw other random numbers than on one device. {advice}, or "
        "strategy.verify=never."
    )


def dry_pass(model: LayeredModel, *, sample_shape: tuple[int, ...]) -> Pass | None:
    """Run the whole `model` on meta; None if it can't run there, because its code needs real numbers."""
    for dtype in INPUT_TYPES:
        tried = deepcopy(model).to("meta").train()
        shown = Pass()
        running: list[str] = []
        for name, module in tried.named_modules():
            module.register_forward_pre_hook(partial(_enter, name, running, shown))
            module.register_forward_hook(partial(_leave, running))
        try:
            with torch.no_grad(), _RandomOperations(shown, running, {name for name, _ in dropouts(tried)}):
                tried(torch.empty(BATCH, *sample_shape, dtype=dtype, device="meta"))
        except Exception:  # of any kind: it is the user's code
            continue
        return shown
    return None


def _enter(name: str, running: list[str], shown: Pass, module: nn.Module, inputs: tuple[Any, ...]) -> None:
    running.append(name)
    if inputs and isinstance(inputs[0], Tensor):
        shown.inputs.setdefault(name, []).append(tuple(inputs[0].shape))


def _leave(running: list[str], module: nn.Module, inputs: Any, output: Any) -> None:
    running.pop()


def _shape(name: str, inputs: list[tuple[int, ...]], halves: list[tuple[int, ...]]) -> WholeShape | None:
    """`inputs`, `halves`: the input shapes with whole and with half sequences; None if they do not fit."""
    if len(inputs) != 1 or len(halves) != 1 or len(inputs[0]) < 2 or len(inputs[0]) != len(halves[0]):
        return None
    (full,), (half,) = inputs, halves
    changed = [dim for dim, (a, b) in enumerate(zip(full, half, strict=True)) if a != b]
    if full[0] != BATCH or len(changed) > 1:
        return None
    return WholeShape(name, full[1:], changed[0] if changed else None)


class _RandomOperations(DispatchMode):
    """Notes operators that draw random numbers outside of dropout layers."""

    def __init__(self, shown: Pass, running: list[str], supported: set[str]) -> None:
        super().__init__()
        self._shown, self._running, self._supported = shown, running, supported

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        place = self._running[-1] if self._running else "forward"
        if torch.Tag.nondeterministic_seeded in func.tags and place not in self._supported:
            name = operator_name(func) or ""
            arguments = operator_arguments(func, args, kwargs)
            if "scaled_dot_product" not in name or arguments.get("dropout_p", 0) > 0:
                self._shown.random.append(f"{place or 'forward'} draws random numbers ({name})")
        return func(*args, **(kwargs or {}))
