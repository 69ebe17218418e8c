"""What an optimizer keeps for each weight, and which device keeps it, as in `training/optimizer.py`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from itertools import product
from typing import Any

STEP_BYTES = 4  # a count in float32
Shape = tuple[int, ...]
Place = tuple[int, ...]
Options = Mapping[str, Any]


@dataclass(frozen=True)
class OptimizerKind:
    """A class of torch.optim.

    kept: how many numbers it keeps for a weight, from the weight's shape and the options of the class.
    counts: whether it also counts the steps of each weight. whole: whether it needs whole weights; then one
    device, the owner, updates each split weight.
    """

    kept: Callable[[Shape, Options], int]
    counts: bool
    whole: bool = False

    def state_bytes(self, shape: Shape, options: Options, *, number_bytes: int) -> int:
        """The bytes that it keeps for a weight, or for a slice of a weight."""
        return self.kept(shape, options) * number_bytes + STEP_BYTES * self.counts


def _adam(shape: Shape, options: Options) -> int:
    return (3 if options.get("amsgrad") else 2) * math.prod(shape)


def _sgd(shape: Shape, options: Options) -> int:
    return math.prod(shape) if options.get("momentum") else 0


def _adafactor(shape: Shape, _: Options) -> int:
    """One row and one column of each matrix (Shazeer and Stern 2018)."""
    numbers = math.prod(shape)
    return numbers // shape[-1] + numbers // shape[-2] if len(shape) > 1 else numbers


def _muon(shape: Shape, _: Options) -> int:
    return math.prod(shape)


KINDS = {
    "torch.optim.AdamW": OptimizerKind(_adam, counts=True),
    "torch.optim.Adam": OptimizerKind(_adam, counts=True),
    "torch.optim.SGD": OptimizerKind(_sgd, counts=False),
    "torch.optim.Adafactor": OptimizerKind(_adafactor, counts=True, whole=True),
    "torch.optim.Muon": OptimizerKind(_muon, counts=False, whole=True),
}


def owners(weights: Iterable[tuple[int, Sequence[int]]]) -> list[Place]:
    """The owner of each weight; all devices own equally many numbers (`training/whole_weights.py:share`).

    weights: for each weight, how many numbers it has, and the degree of each axis of its mesh (1 for an axis
    that does not split the weight).
    """
    loads: defaultdict[Place, int] = defaultdict(int)
    queues: dict[Place, list[tuple[int, int, Place]]] = {}  # load, number and place; loads may be outdated
    chosen = []
    for numbers, degrees in weights:
        places = product(*map(range, degrees))
        queue = queues.setdefault(tuple(degrees), [(0, number, place) for number, place in enumerate(places)])
        while queue[0][0] != loads[queue[0][2]]:
            heapreplace(queue, (loads[queue[0][2]], *queue[0][1:]))
        owner = queue[0][2]
        loads[owner] += numbers
        chosen.append(owner)
    return chosen
