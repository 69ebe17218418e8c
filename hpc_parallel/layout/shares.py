"""Uneven devices (`strategy.shares`): split a batch or a pipeline by the speed of each part."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Any

from hpc_parallel.layout.layout import Layout

KEY, MEASURED = "strategy.shares", "measured"
MOST_SLOWDOWN = 1.25  # of a batch split into whole samples, against an exact split
MOST_RATIO = 100  # of the fastest to the slowest device: a slower one only delays the others


def apportion(total: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Split `total` into one positive integer (a part) for each share.

    The largest part / share is as small as possible; part / share is the time of a device whose speed is its
    share. `total` must be at least the number of shares.
    """
    share_sum = sum(shares)
    parts = [max(1, int(total * share / share_sum)) for share in shares]
    missing = total - sum(parts)  # below 0 if small shares were rounded up to 1
    times = [_next_time(parts[i], share, missing) for i, share in enumerate(shares)]
    queue = [(time, i) for i, time in enumerate(times) if time is not None]
    heapify(queue)
    for _ in range(abs(missing)):
        _, i = heappop(queue)
        parts[i] += 1 if missing > 0 else -1
        if (time := _next_time(parts[i], shares[i], missing)) is not None:
            heappush(queue, (time, i))
    return tuple(parts)


def _next_time(part: int, share: float, missing: int) -> float | None:
    """The sort key of a change: add to the part that would end first, or take from the part that ends last.

    None: nothing can be taken from this part.
    """
    if missing > 0:
        return (part + 1) / share
    return -part / share if part > 1 else None


def slowdown(parts: Sequence[int], shares: Sequence[float]) -> float:
    """The time with `parts` as a multiple of the time if they were exactly proportional to `shares`."""
    longest = max(part / share for part, share in zip(parts, shares, strict=True))
    return longest * sum(shares) / sum(parts)


def fits(replicas: int, size: int, shares: Sequence[float]) -> bool:
    """Whether whole samples come near the shares; `size` is the mean number of a replica."""
    return slowdown(apportion(replicas * size, shares), shares) <= MOST_SLOWDOWN


def divided(layout: Layout) -> int:
    """The number of parts that shares divide: stages of a pipeline, else replicas; 1 if there is neither."""
    return layout.pipeline if layout.pipeline > 1 else layout.data


def batch_shares(shares: Any, layout: Layout) -> list[float] | None:
    """The share of the batch of each replica; None if all have the same, or if they are not measured yet."""
    return None if layout.pipeline > 1 else _numbers(shares)


def stage_shares(shares: Any, *, degree: int) -> list[float]:
    """The speed of each rank of a pipeline of `degree` ranks."""
    return _numbers(shares) or [1.0] * degree


def _numbers(shares: Any) -> list[float] | None:
    """Only ratios matter: the largest becomes 1, so that no sum or quotient overflows."""
    if shares in (None, MEASURED):
        return None
    largest = max(shares)
    return [share / largest for share in shares]
