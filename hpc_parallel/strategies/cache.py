"""Key-value cache: the forward pass of a new token computes one position (Pope et al. 2022, section 2).

Works for every model that mixes positions only in `CausalAttention` and gets position indices from it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.attention import SDPBackend, sdpa_kernel

from hpc_parallel.models.attention import Attention, Bias, CausalAttention, Positions, attend, attend_with
from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.problems import Problem, Problems
from hpc_parallel.strategies.dry_forward import find_local_positions
from hpc_parallel.strategies.replace_forward import Forward, replace_forward, replace_modules

OF_ANY_LENGTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""cuDNN plans its kernel anew for each number of keys: 37 ms for each token of 12 layers on an H200."""


def find_problems(model: LayeredModel) -> Problems:
    """Returns why the whole `model`, on meta, can't continue a text with cached keys and values."""
    rule = ""
    if not all(module.causal for module in model.modules() if isinstance(module, Attention)):
        rule = f"can't be used: {type(model).__name__} has FullAttention, which sees later tokens"
    elif not any(isinstance(module, CausalAttention) for module in model.modules()):
        rule = f"needs a model with CausalAttention, and {type(model).__name__} has none"
    elif name := _used_again(model):
        rule = f"can't be used: {type(model).__name__}.{name} is used in several places, and has one cache"
    elif clause := find_local_positions(model):
        rule = f"can't be used: {type(model).__name__}.{clause}, and a new token is computed alone"
    if rule:
        yield Problem("task", "generate", rule, ("infer",))


def _used_again(model: LayeredModel) -> str | None:
    """The second name of the first attention that the model uses in several places."""
    seen: set[int] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, CausalAttention):
            if id(module) in seen:
                return str(name)
            seen.add(id(module))
    return None


def apply(model: LayeredModel, *, length: int, keeps: bool = False) -> LayeredModel:
    """Let `model` (or a stage of it) take a prompt, then one position at a time, `length` positions in all.

    The head computes the last position only, because the logits of others are not needed. `keeps`: its inputs
    are kept for `whole_text`, which takes less memory than logits. `find_problems` must have found nothing.
    """
    past = model.sample_positions = Past(keeps=keeps)
    replace_modules(model, CausalAttention, partial(_cached, past=past, length=length))
    replace_forward(model, partial(count_positions, past), technique="Cached")
    if model.head is not None:
        replace_forward(model.head, partial(last_position, past), technique="LastPosition")
    return model


def _cached(whole: CausalAttention, *, past: Past, length: int) -> CachedAttention:
    """The attention with a cache that replaces `whole`."""
    cached = CachedAttention(past, length=length)
    cached.local_bias = whole.local_bias
    return cached


@contextmanager
def whole_text(model: LayeredModel, *, row: int, passes: slice) -> Iterator[None]:
    """Let the next pass of a `model` that `apply` changed read a whole text [1, seq] from the start.

    Its output has the logits of the last positions twice, [2, positions, vocab]: those of the whole text, and
    those of `row` in earlier `passes`, which the head computes again from its kept inputs.
    """
    past = model.sample_positions
    assert isinstance(past, Past)
    past.length = 0
    if model.head is not None:
        past.compared = torch.stack([x[row] for x in past.kept[passes]])
    yield
    past.compared = None


def count_positions(past: Past, forward: Forward, model: LayeredModel, x: Tensor) -> Tensor:
    out = forward(model, x)
    past.length += x.shape[1]
    return out


def last_position(past: Past, forward: Forward, head: Module, x: Tensor) -> Tensor:
    if past.compared is not None:
        cached = forward(head, past.compared).transpose(0, 1)
        return torch.cat([forward(head, x[:, -cached.shape[1] :]), cached])
    last = x[:, -1:]
    if past.keeps:
        past.kept.append(last.clone())
    return forward(head, last)


class Past(Positions):
    """The number of positions that the model has processed; the next positions follow them."""

    def __init__(self, *, keeps: bool = False) -> None:
        self.length = 0
        self.keeps = keeps
        self.kept: list[Tensor] = []  # the inputs of the head in each pass, [batch, 1, dim]
        self.compared: Tensor | None = None  # in `whole_text`: kept inputs [positions, 1, dim]

    def __call__(self, length: int, *, device: torch.device) -> Tensor:
        return torch.arange(self.length, self.length + length, device=device)

    def key(self, length: int) -> Hashable:
        return self.length, length


class CachedAttention(CausalAttention):
    """Attention over the positions of all passes so far; a device caches the heads that it has."""

    keys: Tensor  # [batch, kv_head, length, head_dim], filled from the front
    values: Tensor
    masks: Tensor | None  # [batch, length] bool; None if no pass has had a key_mask

    def __init__(self, past: Past, *, length: int) -> None:
        super().__init__(past)
        self._past = past
        self._length = length

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        bias: Bias | None = None,
        key_mask: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Like `CausalAttention.forward`; after the first pass `query` has one position, which sees all.

        A prompt is one document, so there are no `documents`.

        A pass without a `key_mask` keeps the masks of earlier passes and hides none of its own keys.
        """
        start, end = self._past.length, self._past.length + key.shape[2]
        if start == 0:  # the number of local heads and the dtype are known only now
            self.keys, self.values = (
                part.new_empty(*part.shape[:2], self._length, part.shape[3]) for part in (key, value)
            )
            self.masks = None
        self.keys[:, :, start:end], self.values[:, :, start:end] = key, value
        if key_mask is not None:
            if self.masks is None:  # keys of passes without a mask are seen
                self.masks = key_mask.new_ones(len(key), self._length)
            self.masks[:, start:end] = key_mask
        key_mask = None if self.masks is None else self.masks[:, :end]
        if bias is None and key_mask is None:
            if start == 0:
                return super().forward(query, key, value)
            with sdpa_kernel(OF_ANY_LENGTH):
                return attend(query, self.keys[:, :, :end], self.values[:, :, :end], causal=False)
        indices = self.positions(query.shape[2], device=query.device), torch.arange(end, device=query.device)
        score_bias = self.score_bias(query, indices, bias=bias, key_mask=key_mask)
        with sdpa_kernel(OF_ANY_LENGTH):
            return attend_with(score_bias, query, self.keys[:, :, :end], self.values[:, :, :end])
