"""Tells the host how many rows the devices of an expert axis send to each other, as early as possible.

A collective needs the sizes of its messages on the host, so the host must read numbers from the device. The
exchange of the numbers and their copy to the host begin before the rows are sorted. The host waits after it
has queued the sorting. The device then has work while the host wakes up and queues the next operations.
Megatron delays the wait too (`cuda_dtoh_stream` of its token dispatcher); torchtitan waits immediately.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hpc_parallel.strategies.ranges import marked
from hpc_parallel.torch_internals import group_of


class Sizes(NamedTuple):
    """How many rows the devices send to each other.

    received_counts: rows for each expert of this device from each device, [device * expert].
    sent, received: rows to and from each device, on the host.
    """

    received_counts: Tensor
    sent: list[int]
    received: list[int]


class RowCounts:
    """The exchange of one layer's counts over `axis`."""

    def __init__(self, axis: DeviceMesh) -> None:
        self._group = axis.get_group()
        self._begun: tuple[Tensor, Tensor, Tensor] | None = None  # counts, received counts, copy of the sizes

    def begin(self, counts: Tensor) -> None:
        """Start to exchange `counts` [expert], int64: the rows of this device for every expert."""
        with marked("all_to_all expert"):
            self._begun = counts, *exchange_counts(counts.contiguous(), self._group.group_name)

    def finish(self, counts: Tensor) -> Sizes:
        """Wait for the sizes; their exchange begins here if `begin` was not called with `counts`."""
        if self._begun is None or self._begun[0] is not counts:
            self.begin(counts)
        assert self._begun is not None
        _, received_counts, copy = self._begun
        self._begun = None
        sent, received = wait_for_copy(copy).tolist()
        return Sizes(received_counts, sent, received)


# The functions below are operators, so that selective checkpointing keeps their results and a recomputation
# does not wait again.
_events: dict[int, torch.cuda.Event] = {}  # events of copies that may be under way, by address on the host


@torch.library.custom_op("hpc_parallel::exchange_counts", mutates_args=())
def exchange_counts(counts: Tensor, group_name: str) -> tuple[Tensor, Tensor]:
    """Returns the received counts [device * expert], and the rows to and from each device [2, device].

    The second tensor is on the host. It is complete when `wait_for_copy` returns.
    """
    group = group_of(group_name)
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=group)
    sizes = torch.stack([table.view(group.size(), -1).sum(1) for table in (counts, received)])
    if sizes.device.type == "cpu":
        return received, sizes
    copy = sizes.to("cpu", non_blocking=True)  # into pinned memory
    event = torch.cuda.Event()
    event.record()
    _events[copy.data_ptr()] = event
    return received, copy


@torch.library.custom_op("hpc_parallel::wait_for_copy", mutates_args=())
def wait_for_copy(copy: Tensor) -> Tensor:
    """Returns the numbers of `copy`, which `exchange_counts` returned, when they are complete."""
    event = _events.pop(copy.data_ptr(), None)
    if event is not None:
        event.synchronize()
    return copy.clone()
