"""Key-value cache: the forward pass of a new token computes one position (Pope et al. 2022, section 2).

Works for every model that mixes positions only in `CausalAttention` and gets position indices from it.
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
    """Let `model` (or a stage of it) take a prompt, then one position at a time, `length` positions in all.

    The head computes the last position only, because the logits of others are not needed.

    Raises ConfigError if the model has no CausalAttention.
    """
    attentions = [name for name, module in model.named_modules() if isinstance(module, CausalAttention)]
    if not attentions:
        rule = f"needs a model with CausalAttention, and {type(model).__name__} has none"
        raise ConfigError([Problem("task", "generate", rule, ("infer",))])
    past = Past()
    for name in attentions:
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
    """The number of positions that the model has processed. Attentions read it also for position indices."""

    def __init__(self) -> None:
        self.length = 0

    def grow(self, positions: int) -> None:
        self.length += positions


class CachedAttention(CausalAttention):
    """Attention over the positions of all passes so far; a device caches the heads that it has."""

    keys: Tensor  # [batch, kv_head, length, head_dim], filled from the front
    values: Tensor

    def __init__(self, past: Past, *, length: int) -> None:
        super().__init__()
        self._past = past
        self._length = length

    def positions(self, length: int, *, device: torch.device) -> Tensor:
        return torch.arange(self._past.length, self._past.length + length, device=device)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Like `CausalAttention.forward`; after the first pass `query` has one position, which sees all."""
        start, end = self._past.length, self._past.length + key.shape[2]
        if start == 0:  # the number of local heads and the dtype are known only now
            self.keys, self.values = (
                part.new_empty(*part.shape[:2], self._length, part.shape[3]) for part in (key, value)
            )
        self.keys[:, :, start:end], self.values[:, :, start:end] = key, value
        if start == 0:
            return super().forward(query, key, value)
        grouped = query.shape[1] != key.shape[1]
        past = self.keys[:, :, :end], self.values[:, :, :end]
        return F.scaled_dot_product_attention(query, *past, enable_gqa=grouped)
