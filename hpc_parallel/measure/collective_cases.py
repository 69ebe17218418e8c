"""The collectives that `task=collectives` times: their buffers and expected values.

Sizes are those of NVIDIA's nccl-tests (PERFORMANCE.md). An all-gather, reduce-scatter or all-to-all has the
size of the array of all ranks together. Other collectives have the size of the array of one rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_parallel import torch_internals
from hpc_parallel.strategies.groups import backend_of

EXACT_INTEGERS = {torch.float32: 2**24, torch.bfloat16: 2**8}  # up to here each integer has its own value
LATE_S = 0.1  # the delay of one rank when a barrier is checked
MOST_VALUES = 251  # a prime: the period of a pattern does not fit the powers of two of chunks


@dataclass(frozen=True)
class Group:
    """The ranks that take part in one collective, and this rank's place among them.

    also: other names of the same ranks, such as `axis shard` of `inside a node`.
    """

    process_group: dist.ProcessGroup
    rank: int
    ranks: int
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class CollectiveCase:
    """One collective with its buffers, on this rank.

    size_bytes: as nccl-tests counts it; run: start the collective once and wait for it, on the device's
    stream if it has one; reset: renew its buffers; check: whether they have the expected values.
    """

    size_bytes: int
    run: Callable[[], object]
    reset: Callable[[], object]
    check: Callable[[], bool]

    def is_right(self) -> bool:
        """Whether `run` once on new buffers gives the expected values."""
        self.reset()
        self.run()
        return self.check()


class Patterns:
    """Values that differ by rank and by element, and that any order of summation adds exactly.

    Element `i` of rank `r` is `(31 i + 17 r) mod period`. The period is so small that the sum over all
    ranks stays an exact integer of the type; above 128 ranks of bfloat16, sums are rounded.
    """

    def __init__(self, group: Group, *, dtype: torch.dtype, device: torch.device) -> None:
        self._period = max(3, min(MOST_VALUES, EXACT_INTEGERS[dtype] // group.ranks + 1))
        self._ranks = range(group.ranks)
        self._dtype, self._device = dtype, device
        self.tolerance = 0.0 if (self._period - 1) * group.ranks <= EXACT_INTEGERS[dtype] else 0.1

    def of(self, rank: int, *, start: int, count: int) -> Tensor:
        """The elements `start` to `start + count` of `rank`: [count]."""
        return self._repeated(self._one_period(rank), start=start, count=count)

    def sum(self, *, start: int, count: int) -> Tensor:
        """The sum over all ranks of the same elements: [count]."""
        total = sum((self._one_period(rank) for rank in self._ranks), torch.zeros(self._period))
        return self._repeated(total, start=start, count=count)

    def matches(self, output: Tensor, expected: Tensor) -> bool:
        """Whether the tensors are equal; a sum that was rounded may differ in its last bits."""
        return bool(torch.allclose(output, expected, rtol=self.tolerance, atol=0.0))

    def _one_period(self, rank: int) -> Tensor:
        return ((31 * torch.arange(self._period) + 17 * rank) % self._period).float()

    def _repeated(self, values: Tensor, *, start: int, count: int) -> Tensor:
        first = values.roll(-(start % self._period)).to(self._device, self._dtype)
        return first.repeat(-(-count // self._period))[:count]


Prepare = Callable[[Group, Patterns, int], CollectiveCase]
"""(group, patterns, elements of the array that nccl-tests counts) -> the collective with its buffers."""


@dataclass(frozen=True)
class Operation:
    """A kind of collective."""

    prepare: Prepare
    by_slices: bool = False  # whether the array has one slice for each rank
    sums: bool = False
    has_size: bool = True
    least_ranks: int = 1


def all_reduce(group: Group, patterns: Patterns, count: int) -> CollectiveCase:
    """Every rank gets the sum of all arrays."""
    array = patterns.of(group.rank, start=0, count=count)
    return CollectiveCase(
        array.nbytes,
        run=partial(dist.all_reduce, array, group=group.process_group),
        reset=lambda: array.copy_(patterns.of(group.rank, start=0, count=count)),
        check=lambda: patterns.matches(array, patterns.sum(start=0, count=count)),
    )


def all_gather(group: Group, patterns: Patterns, count: int) -> CollectiveCase:
    """Every rank gets the slices of all ranks."""
    length = count // group.ranks
    part = patterns.of(group.rank, start=0, count=length)
    array = part.new_zeros(count)

    def check() -> bool:
        slices = enumerate(array.chunk(group.ranks))
        return all(patterns.matches(s, patterns.of(rank, start=0, count=length)) for rank, s in slices)

    run = partial(torch_internals.all_gather, array, part, group=group.process_group)
    return CollectiveCase(array.nbytes, run, reset=array.zero_, check=check)


def reduce_scatter(group: Group, patterns: Patterns, count: int) -> CollectiveCase:
    """Every rank gets its slice of the sum of all arrays."""
    length = count // group.ranks
    array = patterns.of(group.rank, start=0, count=count)
    part = array.new_zeros(length)
    return CollectiveCase(
        array.nbytes,
        run=partial(torch_internals.reduce_scatter, part, array, group=group.process_group),
        reset=part.zero_,
        check=lambda: patterns.matches(part, patterns.sum(start=group.rank * length, count=length)),
    )


def broadcast(group: Group, patterns: Patterns, count: int) -> CollectiveCase:
    """Every rank gets the array of the first rank."""
    array = patterns.of(group.rank, start=0, count=count)
    return CollectiveCase(
        array.nbytes,
        run=partial(dist.broadcast, array, group_src=0, group=group.process_group),
        reset=lambda: array.copy_(patterns.of(group.rank, start=0, count=count)),
        check=lambda: patterns.matches(array, patterns.of(0, start=0, count=count)),
    )


def reduce(group: Group, patterns: Patterns, count: int) -> CollectiveCase:
    """The first rank gets the sum of all arrays."""
    array = patterns.of(group.rank, start=0, count=count)
    return CollectiveCase(
        array.nbytes,
        run=partial(dist.reduce, array, group_dst=0, group=group.process_group),
        reset=lambda: array.copy_(patterns.of(group.rank, start=0, count=count)),
        check=lambda: group.rank != 0 or patterns.matches(array, patterns.sum(start=0, count=count)),
    )


def all_to_all(group: Group, patterns: Patterns, count: int) -> CollectiveCase:
    """Every rank gets, from each rank, the slice that is meant for it."""
    length = count // group.ranks
    sent = patterns.of(group.rank, start=0, count=count)
    received = sent.new_zeros(count)

    def check() -> bool:
        start = group.rank * length
        slices = enumerate(received.chunk(group.ranks))
        return all(patterns.matches(s, patterns.of(rank, start=start, count=length)) for rank, s in slices)

    run = partial(dist.all_to_all_single, received, sent, group=group.process_group)
    return CollectiveCase(sent.nbytes, run, reset=received.zero_, check=check)


def send_recv(group: Group, patterns: Patterns, count: int) -> CollectiveCase:
    """Every rank sends its array to the next rank and gets the array of the rank before it."""
    before, after = (group.rank - 1) % group.ranks, (group.rank + 1) % group.ranks
    sent = patterns.of(group.rank, start=0, count=count)
    received = sent.new_zeros(count)

    def run() -> None:
        transfers = [
            dist.P2POp(dist.isend, sent, group=group.process_group, group_peer=after),
            dist.P2POp(dist.irecv, received, group=group.process_group, group_peer=before),
        ]
        for work in dist.batch_isend_irecv(transfers):
            work.wait()

    def check() -> bool:
        return patterns.matches(received, patterns.of(before, start=0, count=count))

    return CollectiveCase(sent.nbytes, run, reset=received.zero_, check=check)


def barrier(group: Group, patterns: Patterns, count: int) -> CollectiveCase:
    """No rank leaves before every rank has come."""
    devices = [torch.cuda.current_device()] if backend_of("cuda", group.process_group) == "nccl" else None
    run = partial(dist.barrier, group=group.process_group, device_ids=devices)

    def check() -> bool:
        started = time.perf_counter()
        if group.rank == group.ranks - 1:
            time.sleep(LATE_S)
        run()
        return time.perf_counter() - started > LATE_S / 2  # half: this rank may leave the first barrier late

    return CollectiveCase(0, run, reset=lambda: None, check=check)


OPERATIONS = {
    "all_reduce": Operation(all_reduce, sums=True),
    "all_gather": Operation(all_gather, by_slices=True),
    "reduce_scatter": Operation(reduce_scatter, by_slices=True, sums=True),
    "broadcast": Operation(broadcast),
    "reduce": Operation(reduce, sums=True),
    "all_to_all": Operation(all_to_all, by_slices=True),
    "send_recv": Operation(send_recv, least_ranks=2),
    "barrier": Operation(barrier, has_size=False),
}


def sizes(least_bytes: int, most_bytes: int, *, factor: int) -> list[int]:
    """`least_bytes`, times `factor` again and again, and `most_bytes`."""
    values = [least_bytes]
    while values[-1] * factor < most_bytes:
        values.append(values[-1] * factor)
    return [*values, *([most_bytes] if most_bytes > least_bytes else [])]


def elements(size_bytes: int, *, operation: Operation, group: Group, dtype: torch.dtype) -> int:
    """The elements of an array of about `size_bytes`: at least one, or one for each rank's slice."""
    count = size_bytes // dtype.itemsize
    slices = group.ranks if operation.by_slices else 1
    return max(count // slices, 1) * slices


def group_of(process_group: dist.ProcessGroup) -> Group:
    return Group(process_group, dist.get_rank(process_group), dist.get_world_size(process_group))


def same_ranks(one: Group, other: Group) -> bool:
    """Whether this rank is with the same ranks in both groups."""
    ranks = dist.get_process_group_ranks
    return ranks(one.process_group) == ranks(other.process_group)
