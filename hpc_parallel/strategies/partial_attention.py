"""Attention to some of the keys: parts that merge exactly, and what each part adds to the gradients.

The softmax of a row is the sum of its parts, weighted by their shares of the row's sum of exponentials, which
is why each part tells its logarithm (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022). Only a
strip of the scores lives at a time and none is kept: the backward pass makes them anew.

Queries are [batch, kv_head, group, seq, head_dim], a key-value head serving a group; keys and values
[batch, kv_head, seq, head_dim]. All is computed in the dtype that comes in: float32 or float64.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

STRIP = 2**18  # scores of a head that live at a time: 1 MiB in float32, at any length


def attend(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """The outputs (like `query`) and the log of each row's sum of exponentials ([..., seq, 1]).

    `causal`: the queries stand at the last positions of the keys, and each sees no key behind its own.
    """
    outputs, log_sums = torch.empty_like(query), torch.empty_like(query[..., :1])
    for rows, seen, hidden in strips(query, key, causal=causal):
        scores = strip_of_scores(query[..., rows, :], key[..., :seen, :], hidden)
        log_sum = scores.logsumexp(-1, keepdim=True)
        weights = scores.sub_(log_sum).exp_()
        outputs[..., rows, :] = over_groups(weights, value[..., :seen, :])
        log_sums[..., rows, :] = log_sum
    return outputs, log_sums


def merge(outputs: Tensor, log_sums: Tensor, *, part: tuple[Tensor, Tensor]) -> None:
    """Add, in place, what the same queries found among other keys."""
    found, log_sum = part
    total = torch.logaddexp(log_sums, log_sum)
    outputs.mul_((log_sums - total).exp_()).add_(found.mul_((log_sum - total).exp_()))
    log_sums.copy_(total)


def attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    log_sums: Tensor,
    slopes: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """What these keys add to the gradients of the queries (like `query`) and of keys and values (stacked).

    gradient: of the merged outputs; log_sums: the merged ones; slopes: of each row, gradient . output.
    """
    scale = query.shape[-1] ** -0.5
    of_queries = torch.empty_like(query)
    of_pairs = torch.zeros((2, *key.shape), dtype=query.dtype, device=query.device)
    for rows, seen, hidden in strips(query, key, causal=causal):
        scores = strip_of_scores(query[..., rows, :], key[..., :seen, :], hidden)
        weights = scores.sub_(log_sums[..., rows, :]).exp_()
        incoming = gradient[..., rows, :]
        of_pairs[1, ..., :seen, :] += sum_of_groups(weights, incoming)
        inner = over_groups(incoming, value[..., :seen, :].mT).sub_(slopes[..., rows, :])
        of_scores = inner.mul_(weights).mul_(scale)
        of_queries[..., rows, :] = over_groups(of_scores, key[..., :seen, :])
        of_pairs[0, ..., :seen, :] += sum_of_groups(of_scores, query[..., rows, :])
    return of_queries, of_pairs


def strips(query: Tensor, key: Tensor, *, causal: bool) -> Iterator[tuple[slice, int, Tensor | None]]:
    """Rows of queries, how many keys they can see, and which of those each row must not ([row, key])."""
    queries, keys = query.shape[-2], key.shape[-2]
    before, height = keys - queries, max(1, STRIP // keys)
    for start in range(0, queries, height):
        end = min(start + height, queries)
        if causal:
            seen = before + end
            everywhere = torch.ones(end - start, seen, dtype=torch.bool, device=query.device)
            yield slice(start, end), seen, everywhere.triu_(before + start + 1)
        else:
            yield slice(start, end), keys, None


def strip_of_scores(query: Tensor, key: Tensor, hidden: Tensor | None) -> Tensor:
    scores = over_groups(query, key.mT).mul_(query.shape[-1] ** -0.5)
    return scores if hidden is None else scores.masked_fill_(hidden, -torch.inf)


def over_groups(left: Tensor, right: Tensor) -> Tensor:
    """[..., group, row, a] x [..., a, b] -> [..., group, row, b], with no copy of `right` for each group."""
    rows = left.flatten(-3, -2) @ right
    return rows.unflatten(-2, left.shape[-3:-1])  # type: ignore[no-any-return]


def sum_of_groups(left: Tensor, right: Tensor) -> Tensor:
    """[..., group, row, a] x [..., group, row, b] -> [..., a, b], summed over group and row."""
    return left.flatten(-3, -2).mT @ right.flatten(-3, -2)
