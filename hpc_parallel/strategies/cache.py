"""Keys and values kept, so that a new token costs one position (Pope et al. 2022, section 2).

Works for every model that mixes positions by `CausalAttention` alone and asks it where they are.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn import functional as F

from hpc_parallel.models.attention import CausalAttention
from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.problems import ConfigError, Problem
from hpc_parallel.strategies.replace_forward import Forward, replace_forward


def apply(model: LayeredModel, *, length: int) -> LayeredModel:
    """Let `model` (or a stage of it) take a prompt, then one position at a time, `length` in all.

    The head sees the last position only: logits of the others would not be asked for.

    Raises ConfigError where there is nothing to keep.
    """
    found = [name for name, module in model.named_modules() if isinstance(module, CausalAttention)]
    if not found:
        rule = f"needs a model that attends by CausalAttention, and {type(model).__name__} does not"
        raise ConfigError([Problem("task", "generate", rule, ("infer",))])
    past = Past()
    for name in found:
        model.set_submodule(name, CachedAttention(past, length=length))
    replace_forward(model, partial(count_positions, past), technique="Cached")
    if model.head is not None:
        replace_forward(model.head, last_position, technique="LastPosition")
    return model


def count_positions(past: Past, forward: Forward, model: LayeredModel, x: Tensor) -> Tensor:
    out = forward(model, x)
    past.grow(x.shape[1])
    return out


def last_position(forward: Forward, head: Module, x: Tensor) -> Tensor:
    return forward(head, x[:, -1:])


class Past:
    """How many positions have been through the whole model: also for a module that only asks where it is."""

    def __init__(self) -> None:
        self.length = 0

    def grow(self, positions: int) -> None:
        self.length += positions


class CachedAttention(CausalAttention):
    """Looks back at the positions of all passes so far; a device with some of the heads keeps theirs."""

    keys: Tensor  # [batch, kv_head, length, head_dim], filled from the front
    values: Tensor

    def __init__(self, past: Past, *, length: int) -> None:
        super().__init__()
        self._past = past
        self._length = length

    def positions(self, length: int, *, device: torch.device) -> Tensor:
        return torch.arange(self._past.length, self._past.length + length, device=device)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The same; after the first pass `query` is of one position, to which all others are past."""
        start, end = self._past.length, self._past.length + key.shape[2]
        if start == 0:  # heads and dtype are known now
            self.keys, self.values = (
                part.new_empty(*part.shape[:2], self._length, part.shape[3]) for part in (key, value)
            )
        self.keys[:, :, start:end], self.values[:, :, start:end] = key, value
        if start == 0:
            return super().forward(query, key, value)
        grouped = query.shape[1] != key.shape[1]
        past = self.keys[:, :, :end], self.values[:, :, :end]
        return F.scaled_dot_product_attention(query, *past, enable_gqa=grouped)
