"""Reads each part of a state on one of the ranks that hold it, which sends it to the others.

Otherwise each of N replicas would read the entire state from the storage. The readers of the parts are
spread over the ranks, so that all ranks read at the same time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from hpc_parallel import torch_internals
from hpc_parallel.strategies.groups import carries
from hpc_parallel.training.checkpoint import StateDict
from hpc_parallel.training.replicas import digest, holding
from hpc_parallel.training.written_parts import chosen, holders


@torch.no_grad()
def read_once(state: StateDict, fill: Callable[[StateDict], object]) -> None:
    """Fill the tensors of `state`. `fill` is called with the tensors that this rank reads.

    All ranks must call it together. If the ranks that hold a part have no process group, each of them reads
    the part.
    """
    keys = {name: digest(holding(name, tensor)) for name, tensor in sorted(state.items())}
    groups = torch_internals.groups_by_ranks()
    shared: dict[str, tuple[int, dist.ProcessGroup]] = {}  # the reader and the group of each part
    for name, ranks in holders(keys).items():
        group = groups.get(ranks)
        if len(ranks) > 1 and group is not None and carries(group, state[name].device.type):
            shared[name] = chosen(ranks, keys[name]), group
    rank = dist.get_rank()
    fill({name: tensor for name, tensor in state.items() if name not in shared or shared[name][0] == rank})
    for name, (reader, group) in shared.items():  # in one order on all ranks
        send(state[name], reader=reader, group=group)


def send(tensor: Tensor, *, reader: int, group: dist.ProcessGroup) -> None:
    """Send the local part of `tensor` from the rank `reader` to all ranks of `group`.

    It sends bytes, because gloo and NCCL do not support every type, for example int16.
    """
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    message = local.contiguous()
    dist.broadcast(message.view(-1).view(torch.uint8), src=reader, group=group)
    if message is not local:
        local.copy_(message)
