"""FreePlaces for runs on the nodes of a packed job: a run takes its place, and gives it back when it ends."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Room:
    """What a node has, or what a run needs of each of its nodes. memory_mb: 0 if nobody counts memory."""

    cpus: int
    gpus: int = 0
    memory_mb: int = 0

    def shared(self, runs_per_gpu: int) -> Room:
        """The same room, if `runs_per_gpu` runs share each GPU: `gpus` counts their shares."""
        return replace(self, gpus=self.gpus * runs_per_gpu)

    def count_of(self, need: Room) -> int:
        """How often `need` fits in here."""
        pairs = ((self.cpus, need.cpus), (self.gpus, need.gpus), (self.memory_mb, need.memory_mb))
        return min((have // wanted for have, wanted in pairs if wanted), default=0)

    def less(self, other: Room) -> Room:
        return Room(self.cpus - other.cpus, self.gpus - other.gpus, self.memory_mb - other.memory_mb)


@dataclass(frozen=True)
class Need:
    """The place of a run: `nodes` nodes with `room` on each."""

    nodes: int
    room: Room


@dataclass(frozen=True)
class RunPlace:
    """Where a run takes place beside others: more variables of its processes, and in an allocation its hosts.

    room: what its nodes have, if runs share GPUs there.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()
    need: Need | None = None
    room: Room | None = None


class FreePlaces:
    """The free room of each node of a job."""

    def __init__(self, nodes: int, room: Room) -> None:
        self._free = [room] * nodes

    def take(self, need: Need) -> tuple[int, ...] | None:
        """The indices of the nodes of the place, the fullest ones that have room; None if there is none."""
        fitting = [index for index, free in enumerate(self._free) if free.count_of(need.room)]
        if len(fitting) < need.nodes:
            return None
        fullest = sorted(fitting, key=lambda index: (self._free[index].gpus, self._free[index].cpus))
        place = tuple(sorted(fullest[: need.nodes]))
        for index in place:
            self._free[index] = self._free[index].less(need.room)
        return place

    def give_back(self, place: Sequence[int], need: Need) -> None:
        for index in place:
            free, room = self._free[index], need.room
            self._free[index] = Room(
                free.cpus + room.cpus, free.gpus + room.gpus, free.memory_mb + room.memory_mb
            )


class SharedGpus:
    """How many runs each GPU of each node has."""

    def __init__(self, nodes: int, gpus: int) -> None:
        self._runs = [[0] * gpus for _ in range(nodes)]

    def take(self, count: int, *, node: int = 0) -> list[int]:
        """The indices of the GPUs of the node with the fewest runs, for one more run."""
        runs = self._runs[node]
        gpus = sorted(sorted(range(len(runs)), key=lambda gpu: runs[gpu])[:count])
        for gpu in gpus:
            runs[gpu] += 1
        return gpus

    def give_back(self, gpus: Sequence[int], *, node: int = 0) -> None:
        for gpu in gpus:
            self._runs[node][gpu] -= 1


def makespan_s(work: Sequence[tuple[Need, float]], *, nodes: int, room: Room) -> float:
    """When the last run ends, if each starts as soon as there is a place, in this order.

    work: the need and the seconds of each run, which must fit.
    """
    places, waiting, now_s = FreePlaces(nodes, room), list(work), 0.0
    active: list[tuple[float, int, Need, tuple[int, ...]]] = []
    while waiting or active:
        left: list[tuple[Need, float]] = []
        for number, (need, seconds) in enumerate(waiting):
            if (place := places.take(need)) is None:
                left.append((need, seconds))
            else:
                heapq.heappush(active, (now_s + seconds, len(waiting) * len(work) + number, need, place))
        waiting = left
        now_s, _, need, place = heapq.heappop(active)
        places.give_back(place, need)
    return now_s


def least_nodes(needs: Sequence[Need], *, most: int, room: Room) -> int:
    """The nodes on which all runs take place at once, or `most` if that is fewer."""
    for nodes in range(1, most):
        places = FreePlaces(nodes, room)
        if all(places.take(need) is not None for need in needs):
            return nodes
    return most
