"""Attention to some of the keys and its gradients, in strips of scores, by torch's public operations.

`attention_kernels.py` uses this module if no fused kernel is used. Only one strip of the scores exists at a
time. No strip is kept: the backward pass computes the scores again.

Queries are [batch, kv_head, group, seq, head_dim]: each key-value head serves a group of query heads. Keys
and values are [batch, kv_head, seq, head_dim]. All computation has the dtype of the inputs, float32 or
float64.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

STRIP = 2**18  # scores of a head that exist at a time: 1 MiB in float32, at any length


def attend(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Returns the outputs (like `query`) and the log of each row's sum of exponentials ([..., seq, 1]).

    `causal`: the queries are at the last positions of the keys, and each sees no key after its own.
    """
    outputs, lse = torch.empty_like(query), torch.empty_like(query[..., :1])
    for rows, end, hidden in strips(query, key, causal=causal):
        scores = strip_of_scores(query[..., rows, :], key[..., :end, :], hidden)
        lse[..., rows, :] = scores.logsumexp(-1, keepdim=True)
        weights = scores.sub_(lse[..., rows, :]).exp_()
        outputs[..., rows, :] = over_groups(weights, value[..., :end, :])
    return outputs, lse


def attend_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    lse: Tensor,
    delta: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Returns what these keys add to the gradients of the queries, and of keys and values (stacked).

    `grad_output`: the gradient of the merged outputs. `lse`: the merged `lse`. `delta`: the dot product of
    grad_output and output in each row.
    """
    scale = query.shape[-1] ** -0.5
    grad_query = torch.empty_like(query)
    grad_kv = torch.zeros((2, *key.shape), dtype=query.dtype, device=query.device)
    for rows, end, hidden in strips(query, key, causal=causal):
        scores = strip_of_scores(query[..., rows, :], key[..., :end, :], hidden)
        weights = scores.sub_(lse[..., rows, :]).exp_()
        grad_rows = grad_output[..., rows, :]
        grad_kv[1, ..., :end, :] += sum_of_groups(weights, grad_rows)
        grad_weights = over_groups(grad_rows, value[..., :end, :].mT)
        grad_scores = grad_weights.sub_(delta[..., rows, :]).mul_(weights).mul_(scale)
        grad_query[..., rows, :] = over_groups(grad_scores, key[..., :end, :])
        grad_kv[0, ..., :end, :] += sum_of_groups(grad_scores, query[..., rows, :])
    return grad_query, grad_kv


def strips(query: Tensor, key: Tensor, *, causal: bool) -> Iterator[tuple[slice, int, Tensor | None]]:
    """Rows of queries, the end of the keys that they can see, and a mask of the hidden keys ([row, key])."""
    queries, keys = query.shape[-2], key.shape[-2]
    before, height = keys - queries, max(1, STRIP // keys)
    for start in range(0, queries, height):
        stop = min(start + height, queries)
        if causal:
            end = before + stop
            hidden = torch.ones(stop - start, end, dtype=torch.bool, device=query.device)
            yield slice(start, stop), end, hidden.triu_(before + start + 1)
        else:
            yield slice(start, stop), keys, None


def strip_of_scores(query: Tensor, key: Tensor, hidden: Tensor | None) -> Tensor:
    scores = over_groups(query, key.mT).mul_(query.shape[-1] ** -0.5)
    return scores if hidden is None else scores.masked_fill_(hidden, -torch.inf)


def over_groups(left: Tensor, right: Tensor) -> Tensor:
    """[..., group, row, a] x [..., a, b] -> [..., group, row, b]; `right` is not copied for each group."""
    rows = left.flatten(-3, -2) @ right
    return rows.unflatten(-2, left.shape[-3:-1])  # type: ignore[no-any-return]


def sum_of_groups(left: Tensor, right: Tensor) -> Tensor:
    """[..., group, row, a] x [..., group, row, b] -> [..., a, b], summed over group and row."""
    return left.flatten(-3, -2).mT @ right.flatten(-3, -2)
