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

from hpc_parallel.models.layered import INPUT_TYPES, LayeredModel
from hpc_parallel.problems import Problems
from hpc_parallel.strategies.dry_forward import running_modules
from hpc_parallel.torch_internals import DispatchMode, operator_arguments, operator_name
from hpc_parallel.user_code import described, hint

ELEMENTWISE = (nn.Dropout,)
CHANNELWISE = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
UNSUPPORTED = (nn.AlphaDropout, nn.FeatureAlphaDropout)
BATCH = 3  # samples of the pass: more than one for BatchNorm, and rarely the size of another dim


@dataclass(frozen=True)
class WholeShape:
    """The shape of one sample in the input of a dropout of the whole model.

    name: the name of the model's class and of the layer. sizes: the shape without the dim of the samples.
    sequence_dims: the dims of the input with the positions of a sequence, if any; dim 0 is that of the
    samples.
    """

    name: str
    sizes: tuple[int, ...]
    sequence_dims: tuple[int, ...] = ()


@dataclass
class Pass:
    """The record of one forward pass.

    random: clauses about operations that draw random numbers. ended: the modules that have returned. error:
    the exception that ended the pass.
    """

    inputs: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    random: list[str] = field(default_factory=list)
    error: Exception | None = None


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
    if full.error is not None:
        return {}
    half = _half_pass(model, sample_shape) or full
    label = type(model).__name__
    shapes = {
        name: _shape(f"{label}.{name}", full.inputs.get(name, []), half.inputs.get(name, []))
        for name in names
    }
    return {name: shape for name, shape in shapes.items() if shape is not None}


def _half_pass(model: LayeredModel, sample_shape: tuple[int, ...]) -> Pass | None:
    """A pass of samples half as long, which shows the dims of a sequence [seq] or [seq, features].

    Returns None if the samples have other dims (images [channel, height, width]), or if the model takes one
    length only (rows of a table), which a layout can't split. The rows of a grey image [height, width] are
    taken for positions.
    """
    if len(sample_shape) not in (1, 2) or sample_shape[0] < 2:
        return None
    half = dry_pass(model, sample_shape=(sample_shape[0] // 2, *sample_shape[1:]))
    return half if half.error is None else None


def find_problems(
    model: LayeredModel, *, sample_shape: tuple[int, ...], dtype: torch.dtype | None = None
) -> Problems:
    """Returns why the whole `model` would draw other random numbers on several devices than on one.

    `dtype`: of the samples, if it is known.
    """
    label = type(model).__name__
    for name, module in model.named_modules():
        if isinstance(module, UNSUPPORTED) and module.p > 0:
            yield _other(f"{label}.{name} is {module}", "Use nn.Dropout, set its probability to 0")
            return
    record = dry_pass(model, sample_shape=sample_shape, dtype=dtype)
    if record.random:
        yield _other(f"{label}.{record.random[0]}", "Use a module nn.Dropout there, set its probability to 0")
        return
    shapes = {} if record.error is not None else whole_shapes(model, sample_shape=sample_shape)
    for name, module in dropouts(model):
        if name in shapes or (record.error is None and name not in record.inputs):  # known, or never called
            continue
        reason = f"{label}.{name} is {module}, and which elements of a sample it gets is not known"
        if record.error is not None:
            yield _other(f"{_described(model, record.error, sample_shape)}. {reason}", "Fix this error")
        else:
            rule = "it must be called once in a forward pass, with the samples as the first dim"
            yield _other(f"{reason}: {rule}", "Set its probability to 0")
        return


def _described(model: LayeredModel, error: Exception, sample_shape: tuple[int, ...]) -> str:
    """The error of the user's own code, with its place in that code."""
    return (
        f"{described(error)}, raised by {type(model).__name__} for samples of shape {list(sample_shape)} "
        f"without memory (on meta){hint(str(error))}"
    )


def _other(reason: str, advice: str) -> str:
    return (
        f"{reason}: it would draw other random numbers than on one device. {advice}, or "
        "strategy.verify=never."
    )


def dry_pass(model: LayeredModel, *, sample_shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Pass:
    """Run the whole `model` on meta, with samples of `dtype` or of the first type that it takes.

    The model can fail on meta because its code needs real numbers, or because the code is wrong. If it takes
    no type, the pass that came farthest tells the reason: a wrong type ends the first layer.
    """
    farthest = Pass()
    kinds = INPUT_TYPES if dtype is None else (torch.float32 if dtype.is_floating_point else dtype,)
    for kind in kinds:
        record = _pass(model, torch.empty(BATCH, *sample_shape, dtype=kind, device="meta"))
        if record.error is None:
            return record
        farthest = max(record, farthest, key=lambda tried: len(tried.ended))
    return farthest


def _pass(model: LayeredModel, samples: Tensor) -> Pass:
    record = Pass()
    try:
        tried = deepcopy(model).to("meta").train()
        for name, module in tried.named_modules():
            module.register_forward_pre_hook(partial(_note_input, name, record))
            module.register_forward_hook(lambda _, inputs, output, name=name: record.ended.append(name))
        supported = {name for name, _ in dropouts(tried)}
        with torch.no_grad(), _RandomOperations(record, running_modules(tried), supported):
            tried(samples)
    except Exception as error:  # of any kind: it is the user's code
        record.error = error
    return record


def _note_input(name: str, record: Pass, module: nn.Module, inputs: tuple[Any, ...]) -> None:
    if inputs and isinstance(inputs[0], Tensor):
        record.inputs.setdefault(name, []).append(tuple(inputs[0].shape))


def _shape(name: str, inputs: list[tuple[int, ...]], halves: list[tuple[int, ...]]) -> WholeShape | None:
    """`inputs`, `halves`: the input shapes with whole and with half sequences; None if they do not fit."""
    if len(inputs) != 1 or len(halves) != 1 or len(inputs[0]) < 2 or len(inputs[0]) != len(halves[0]):
        return None
    (full,), (half,) = inputs, halves
    changed = [dim for dim, (a, b) in enumerate(zip(full, half, strict=True)) if a != b]
    if full[0] != BATCH or 0 in changed:
        return None
    return WholeShape(name, full[1:], tuple(changed))


class _RandomOperations(DispatchMode):
    """Notes operators that draw random numbers outside of dropout layers."""

    def __init__(self, record: Pass, running: list[str], supported: set[str]) -> None:
        super().__init__()
        self._record, self._running, self._supported = record, running, supported

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        place = self._running[-1] if self._running else "forward"
        if torch.Tag.nondeterministic_seeded in func.tags and place not in self._supported:
            name = operator_name(func) or ""
            arguments = operator_arguments(func, args, kwargs)
            if "scaled_dot_product" not in name or arguments.get("dropout_p", 0) > 0:
                self._record.random.append(f"{place} draws random numbers ({name})")
        return func(*args, **(kwargs or {}))
