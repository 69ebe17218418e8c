"""Chooses which rank writes or reads which part of a checkpoint: one of the ranks that hold the same part.

torch.distributed.checkpoint removes duplicates too, but only after each replica has copied its entire state
to the host, and has sent the plan for its entire state to rank 0. Each of N replicas would read all of it.
The readers are spread over the ranks, which read at the same time and send the parts to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hpc_parallel import torch_internals
from hpc_parallel.models.drawn_weights import local_of
from hpc_parallel.strategies import exchange
from hpc_parallel.strategies.groups import carries
from hpc_parallel.training.checkpoint import StateDict
from hpc_parallel.training.replicas import digest, holding


class WrittenParts:
    """The parts that this rank writes.

    All ranks choose together, at the first save and when the parts of any rank change.
    """

    def __init__(self) -> None:
        self._keys: dict[str, int] = {}
        self._written: frozenset[str] = frozenset()

    def of(self, state: StateDict) -> StateDict:
        """Returns the part of `state` that this rank writes. All ranks must call it together."""
        keys = {name: digest(holding(name, tensor)) for name, tensor in state.items()}
        changed = float(keys != self._keys)
        if max(exchange.all_gather_numbers([changed], device=exchange.CPU)[0]):
            self._keys, self._written = keys, written(keys)
        return {name: tensor for name, tensor in state.items() if name in self._written}


def written(keys: dict[str, int]) -> frozenset[str]:
    """The names that this rank writes. `keys`: equal on two ranks that hold the same part of a tensor."""
    rank = dist.get_rank()
    return frozenset(name for name, ranks in holders(keys).items() if chosen(ranks, keys[name]) == rank)


def chosen(ranks: Sequence[int], key: int) -> int:
    """The one of `ranks` that reads or writes a part for all of them. `key`: the key of this part."""
    return ranks[key % len(ranks)]


def holders(keys: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """For each part that this rank holds, all ranks that hold it, in order.

    All ranks must call it together.
    """
    table = all_keys(list(keys.values())).numpy()  # [rank, key]
    order = table.ravel().argsort(kind="stable")  # stable: keeps the holders of a key in the order of ranks
    ordered = table.ravel()[order]
    ranks: dict[str, tuple[int, ...]] = {}
    for name, key in keys.items():
        first, end = np.searchsorted(ordered, key, "left"), np.searchsorted(ordered, key, "right")
        ranks[name] = tuple(np.unique(order[first:end] // table.shape[1]).tolist())
    return ranks


def all_keys(keys: list[int]) -> Tensor:
    """The keys of all ranks: [rank, key], int64, padded with -1, which is never a key."""
    (counts,) = exchange.all_gather_numbers([float(len(keys))], device=exchange.CPU)
    row = torch.full((int(max(counts)),), -1, dtype=torch.int64)
    row[: len(keys)] = torch.tensor(keys, dtype=torch.int64)
    rows = [torch.empty_like(row) for _ in counts]
    dist.all_gather(rows, row)
    return torch.stack(rows)


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
    local = local_of(tensor)
    message = local.contiguous()
    dist.broadcast(message.view(-1).view(torch.uint8), src=reader, group=group)
    if message is not local:
        local.copy_(message)
