"""Which values of a run folder can be shown and used in calculations; anybody may have written them.

`Spread` is how much the throughput of one run varied: the range of its middle half.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_parallel.record.endings import RankState, Summary
from hpc_parallel.record.values import number as finite

MAX_COUNT = 2**31  # of devices, samples of a batch, degrees of an axis, steps
LARGEST, SMALLEST = 1e18, 1e-18  # limits of a figure, so that ratios and sums are finite


def number(value: Any) -> float | None:
    """A figure that can be shown and used in calculations; None for any other value."""
    figure = finite(value)
    return figure if figure is not None and (figure == 0 or SMALLEST <= abs(figure) <= LARGEST) else None


def is_count(value: Any) -> bool:
    """Whether the value is a positive integer of a plausible size."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_COUNT


def rank_states(summary: Summary) -> Sequence[RankState]:
    """The state of each rank, by rank; empty if it is unknown or not valid."""
    states = tuple(state for state in summary.rank_state_bytes if state is not None and _is_valid(state))
    return states if len(states) == len(summary.rank_state_bytes) else ()


def fullest(summary: Summary) -> float | None:
    """The bytes of the rank with the most state; None if unknown."""
    return max((state.total for state in rank_states(summary)), default=None)


def _is_valid(state: RankState) -> bool:
    amounts = (state.parameters, state.gradients, state.optimizer)
    return all(number(amount) is not None and amount >= 0 for amount in amounts)


NOISE = 0.05  # relative: a smaller difference between two measured figures is noise
ROUNDING = 2**-8  # relative: bfloat16 can't tell apart losses that differ by less
FEWEST_LINES = 3  # with fewer timed lines of metrics, a range says nothing


@dataclass(frozen=True)
class Spread:
    """The throughput of the timed steps of one run.

    A line of `metrics.jsonl` has the mean of its timed steps. At least half of these means are in `limits`
    (samples/s), and so is their median. `limits` is None if there are too few lines.
    """

    timed_steps: int = 0
    limits: tuple[float, float] | None = None

    def as_record(self) -> dict[str, Any]:
        """The values for `report.csv`."""
        low, high = self.limits or (None, None)
        return {"samples_per_s_low": low, "samples_per_s_high": high, "timed_steps": self.timed_steps}


def meet(one: tuple[float, float], other: tuple[float, float], *, noise: float = 0.0) -> bool:
    """Whether two ranges have a value in common, or are apart by at most `noise` of the largest."""
    gap = max(one[0], other[0]) - min(one[1], other[1])
    return gap <= noise * max(map(abs, (*one, *other)))


def throughput_spread(lines: Sequence[Mapping[str, Any]]) -> Spread:
    """The spread over all lines except the first, which contains the warm-up.

    `samples_per_s` leaves out the first line too.
    """
    timed_steps, rates = 0, []
    for line in lines[1:]:
        rate, steps = number(line.get("samples_per_s")), line.get("timed_steps", 1)
        if rate is not None and rate > 0 and is_count(steps) and "batch_size" not in line:
            timed_steps += steps
            rates.append(rate)
    if len(rates) < FEWEST_LINES:
        return Spread(timed_steps)
    rates.sort()
    last = len(rates) - 1
    return Spread(timed_steps, (rates[math.floor(last / 4)], rates[math.ceil(3 * last / 4)]))
