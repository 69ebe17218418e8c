"""Throughput of ours divided by a peer's, from alternating pairs of blocks of steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import median

LEAST_PAIRS = 10


@dataclass(frozen=True)
class Ratio:
    """The median of the pairs and its 95 % interval."""

    median: float
    low: float
    high: float
    pairs: int

    @property
    def spread(self) -> float:
        """The larger distance of an end of the interval from the median, relative to it."""
        return max(self.high - self.median, self.median - self.low) / self.median


def ratio_of(ours_s: Sequence[float], theirs_s: Sequence[float]) -> Ratio:
    """`ours_s`, `theirs_s`: the seconds of each pair of blocks. Above 1, ours is faster."""
    ratios = sorted(theirs / ours for ours, theirs in zip(ours_s, theirs_s, strict=True))
    lowest, highest = interval_places(len(ratios))
    return Ratio(median(ratios), ratios[lowest], ratios[highest], len(ratios))


def interval_places(count: int, *, confidence: float = 0.95) -> tuple[int, int]:
    """The places in `count` ordered values between which the median lies with `confidence` (binomial).

    With fewer than six values no two of them are enough, and the outermost are returned.
    """
    outside, place = 0.0, 0
    while place < count // 2:
        outside += 2 * comb(count, place) / 2**count
        if outside > 1 - confidence:
            break
        place += 1
    place = max(place - 1, 0)
    return place, count - 1 - place


def blocks_s(steps_s: Sequence[float], *, steps: int) -> list[float]:
    """The seconds of each complete block of `steps` steps."""
    starts = range(0, len(steps_s) - steps + 1, steps)
    return [sum(steps_s[start : start + steps]) for start in starts]
