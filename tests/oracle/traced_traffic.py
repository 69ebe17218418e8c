"""The collectives of a traced step: kind, axes, number of ranks, calls and bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from hpc_parallel.layout.layout import Layout
from hpc_parallel.profiling.traffic import Moved, Traffic


@dataclass(frozen=True)
class TracedCollective:
    """What one rank sends in a step by one kind of collective over one group.

    over: the axes that the group's ranks differ on. calls: the number of collectives in which this rank
    sends. sent_bytes: the bytes of the best algorithm, as `Traffic` counts them.
    """

    kind: str
    over: str
    ranks: int
    calls: int
    sent_bytes: int


Key = tuple[str, tuple[int, ...]]  # kind and ranks


MOST = 3  # microbatches to trace: the first, the last, and one that stands for all between them


@dataclass
class Counts:
    """The calls and bytes of one microbatch, by kind and ranks."""

    calls: Counter[Key] = field(default_factory=Counter)
    bytes: Counter[Key] = field(default_factory=Counter)


class GroupTraffic(Traffic):
    """Counts as `Traffic` does, and also by group and by microbatch of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.microbatches: list[Counts] = []

    def begin_microbatch(self) -> None:
        """Count the messages that follow for the next microbatch."""
        self.microbatches.append(Counts())

    def _count(self, kind: str, moved: Moved, group: Any) -> None:
        super()._count(kind, moved, group)
        self.note(kind, round(moved.sent), ranks=dist.get_process_group_ranks(group))

    def note(self, kind: str, sent_bytes: int, *, ranks: Sequence[int]) -> None:
        """Count one message."""
        if sent_bytes:
            if not self.microbatches:
                self.begin_microbatch()
            key, counts = (kind, tuple(sorted(ranks))), self.microbatches[-1]
            counts.calls[key] += 1
            counts.bytes[key] += sent_bytes


def of_step(traced: GroupTraffic, *, microbatches: int, layout: Layout, first: int) -> list[TracedCollective]:
    """The collectives of a step with `microbatches`, of which at most MOST were traced.

    first: the rank at the first place of the layout.
    """
    calls, sent = Counter[Key](), Counter[Key]()
    for index, counts in enumerate(traced.microbatches):
        times = 1 + max(0, microbatches - MOST) if index == 1 else 1
        for key in counts.bytes:
            calls[key] += times * counts.calls[key]
            sent[key] += times * counts.bytes[key]
    return [
        TracedCollective(
            kind, _axes(ranks, layout, first=first), len(ranks), calls[kind, ranks], sent[kind, ranks]
        )
        for kind, ranks in sent
    ]


def _axes(ranks: Sequence[int], layout: Layout, *, first: int) -> str:
    """The axes on which the first and the last rank differ. This suffices for the groups of a mesh."""
    if min(ranks) < first:
        return "all ranks"
    low, high = (layout.coordinates(rank - first) for rank in (ranks[0], ranks[-1]))
    return " x ".join(axis for axis in layout.degrees if low[axis] != high[axis])
