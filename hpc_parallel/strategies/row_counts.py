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


class Announced(NamedTuple):
    """How many rows the devices send to each other.

    received: rows for each expert of this device from each device, [device * expert]. sizes: rows to and from
    each device, [2, device], on the host; complete when `wait_for_copy` returns.
    """

    received: Tensor
    sizes: Tensor


def begin(axis: DeviceMesh, counts: Tensor) -> Announced:
    """Start to exchange `counts` [expert], int64: the rows of this device for every expert."""
    with marked("all_to_all expert"):
        return Announced(*exchange_counts(counts.contiguous(), axis.get_group().group_name))


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


@exchange_counts.register_fake
def _(counts: Tensor, group_name: str) -> tuple[Tensor, Tensor]:
    sizes = counts.new_empty((2, group_of(group_name).size()), device="cpu")
    return torch.empty_like(counts), sizes


@torch.library.custom_op("hpc_parallel::wait_for_copy", mutates_args=())
def wait_for_copy(copy: Tensor) -> Tensor:
    """Returns the numbers of `copy`, which `exchange_counts` returned, when they are complete."""
    event = _events.pop(copy.data_ptr(), None)
    if event is not None:
        event.synchronize()
    return copy.clone()


wait_for_copy.register_fake(torch.empty_like)
