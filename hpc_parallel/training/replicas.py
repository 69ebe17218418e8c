"""Compares the weights of ranks that must hold equal weights, by a checksum of their bits.

Replicas begin with equal weights and take equal steps. A flipped bit makes a replica differ, and so does an
update that is not the same on all ranks. Nothing else would notice it. A checkpoint of unequal replicas would
mix them. A rank sums the bits of each weight on its device and sends only a few numbers.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from hpc_parallel.failure.left_out import left_out
from hpc_parallel.models.drawn_weights import local_of
from hpc_parallel.strategies import exchange
from hpc_parallel.strategies.exchange import FollowerError
from hpc_parallel.training.nonfinite import order

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)  # the widest are summed fastest


class ReplicaError(RuntimeError):
    """Raised on the rank whose weights differ from those of its replicas."""

    def __init__(self, message: str, *, step: int, parameter: str) -> None:
        super().__init__(message)
        self.details: dict[str, Any] = {"step": step, "parameter": parameter}


class ReplicaCheck:
    """Compares this rank's weights with those of the ranks that must hold the same weights."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        *,
        tensor_rank: int,
        device: torch.device,
    ) -> None:
        """`weights`: this rank's weights by full name; empty if this rank has no replica.

        `tensor_rank`: this rank's position on the axis `tensor`. The ranks of this axis compute weights that
        none of them averages, so only ranks at the same position are compared.
        """
        self._weights = dict(sorted(weights.items(), key=lambda item: order(item[0])))
        # A weight that is split and one that is not may have different replicas.
        self._names: dict[bool, list[str]] = {False: [], True: []}
        for name, weight in self._weights.items():
            self._names[is_split(weight)].append(name)
        self._holdings = [
            digest([tensor_rank, [holding(name, self._weights[name]) for name in names]])
            for names in self._names.values()
        ]
        self._kind = digest(kind_of(device))
        self._on = True

    def check(self, step: int) -> None:
        """Compare the weights after `step` (0: before the first). All ranks must call it together.

        If the devices are of several kinds, only the weights before the first step are compared, because sums
        in another order differ in the last bit. Raises ReplicaError on a rank that differs, FollowerError on
        the others. If a rank can't sum its weights, no weights are compared from then on.
        """
        if not self._on:
            return
        sums: dict[str, int] = {}
        row = [0] * 5
        with left_out("the comparison of replicas is"):
            sums = checksums(self._weights)
            values = [digest([sums[name] for name in names]) for names in self._names.values()]
            pairs = zip(self._holdings, values, strict=True)  # whole weights, then split ones
            row = [self._kind, *chain.from_iterable(pairs)]
        rows = [torch.empty(len(row), dtype=torch.int64) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, torch.tensor(row))
        table: list[list[int]] = torch.stack(rows).tolist()
        self._on = [0] * 5 not in table
        if not self._on or (step and len({kind for kind, *_ in table}) > 1):
            return
        for split, column in ((False, 1), (True, 3)):
            if differing := first_difference([(row[column], row[column + 1]) for row in table]):
                self._raise(step, sums, split=split, ranks=differing)

    def _raise(self, step: int, sums: Mapping[str, int], *, split: bool, ranks: Sequence[int]) -> NoReturn:
        """`ranks`: the replicas of one part, whose checksums are not all equal."""
        local_sums = {name: str(sums[name]) for name in self._names[split]}
        by_rank = exchange.all_gather(local_sums)
        rank, reference, name = blame({rank: by_rank[rank] for rank in ranks})
        when = f"after step {step}" if step else "before the first step"
        message = f"{name} is not that of rank {reference}, its replica, {when}"
        if rank == dist.get_rank():
            raise ReplicaError(message, step=step, parameter=name)
        raise FollowerError(f"ended with rank {rank}: {message}")


def first_difference(rows: Sequence[tuple[int, int]]) -> list[int]:
    """The first group of ranks that hold the same weights with different checksums; empty if there is none.

    `rows`: for each rank, a key of the weights that it holds, and their checksum.
    """
    ranks: dict[int, list[int]] = defaultdict(list)
    for rank, (holdings, _) in enumerate(rows):
        ranks[holdings].append(rank)
    unequal = (members for members in ranks.values() if len({rows[rank][1] for rank in members}) > 1)
    return next(unequal, [])


def blame(sums: Mapping[int, Mapping[str, str]]) -> tuple[int, int, str]:
    """The first rank in the minority, the first rank in the majority, and the first weight that differs.

    `sums`: rank -> checksum by name, in the order of the model. If there are only two replicas, the one with
    the higher rank is blamed.
    """
    names = next(iter(sums.values()))
    name = next(name for name in names if len({table[name] for table in sums.values()}) > 1)
    counts = Counter(table[name] for table in sums.values())  # if counts are equal, the lowest rank's
    common, _ = counts.most_common(1)[0]
    reference = next(rank for rank, table in sums.items() if table[name] == common)
    return next(rank for rank, table in sums.items() if table[name] != common), reference, name


@torch.no_grad()
def checksums(weights: Mapping[str, Tensor]) -> dict[str, int]:
    """The sum of the bits of each weight's local part, in words, modulo 2^64.

    The host waits for the device once.
    """
    if not weights:
        return {}
    sums = torch.stack([bit_sum(weight) for weight in weights.values()])
    return dict(zip(weights, sums.tolist(), strict=True))


def bit_sum(weight: Tensor) -> Tensor:
    """The sum of the bits of a weight's local part, a scalar on its device."""
    flat = local_of(weight).detach().contiguous().view(-1)
    start = flat.storage_offset() * flat.element_size()
    word = next(word for word in _WORDS if start % word.itemsize == flat.nbytes % word.itemsize == 0)
    words = flat.view(word)
    if words.device.type == "cpu":  # one core is faster: torch's threads wait for each other
        return torch.from_numpy(np.add.reduce(words.numpy(), dtype=np.int64, keepdims=True)).squeeze()
    return words.sum(dtype=torch.int64)


def is_split(weight: Tensor) -> bool:
    return isinstance(weight, DTensor) and not all(place.is_replicate() for place in weight.placements)


def holding(name: str, weight: Tensor) -> list[Any]:
    """Which part of which weight this rank has."""
    parts: list[Any] = []
    if isinstance(weight, DTensor):
        mesh = weight.device_mesh
        parts = [
            [str(place), mesh.size(axis), mesh.get_local_rank(axis)]
            for axis, place in enumerate(weight.placements)
            if not place.is_replicate()
        ]
    return [name, list(weight.shape), str(weight.dtype), parts]


def kind_of(device: torch.device) -> list[Any]:
    """The properties of a device that decide in which order it sums numbers."""
    if device.type == "cuda":
        return [torch.cuda.get_device_name(device)]
    return [platform.machine(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()]


def digest(value: Any) -> int:
    """A hash of 63 bits of a JSON value."""
    content = json.dumps(value, separators=(",", ":")).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") >> 1
