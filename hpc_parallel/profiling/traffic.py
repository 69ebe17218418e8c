"""Bytes between ranks: what each collective of a step sends and receives by its best algorithm.

Counted where torch dispatches them, so DistributedDataParallel's, DTensor's and a pipeline's are seen like
one's own. Volumes are those of ring algorithms (NVIDIA nccl-tests, PERFORMANCE.md): for n ranks and S bytes
an all-reduce moves 2 (n-1)/n S through each rank, an all-gather or reduce-scatter (n-1)/n S of the whole
array. A backend may move more: gloo does a reduce-scatter as an all-reduce.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from hpc_parallel.torch_internals import DispatchMode, group_of, operator_arguments, operator_name


class Moved(NamedTuple):
    """Bytes of one rank."""

    sent: float
    received: float


class Place(NamedTuple):
    """Where this rank stands in a group."""

    rank: int
    ranks: int


Rule = Callable[[Mapping[str, Any], Place], Moved]


class Traffic(DispatchMode):
    """Counts the bytes that this rank moves while it is active, by kind of collective."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.unknown: set[str] = set()  # collectives whose bytes no rule gives

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled blocks stay compiled; their collectives are seen where they run."""
        return True

    def note(self, kind: str, moved: Moved) -> None:
        self.sent[kind] += round(moved.sent)
        self.received[kind] += round(moved.received)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own collectives come by when it has taken itself apart
        name = operator_name(function) or ""
        if name in KINDS:
            given = operator_arguments(function, args, kwargs)
            kind, rule = KINDS[name]
            self.note(kind, rule(given, place(given)))
        elif name.startswith(COLLECTIVES) and name not in WITHOUT_BYTES:
            self.unknown.add(name)
        return function(*args, **(kwargs or {}))


def place(given: Mapping[str, Any]) -> Place:
    """This rank's in the group that a collective was called with: an object, or a name."""
    group = group_of(given["process_group"] if "process_group" in given else given["group_name"])
    return Place(rank=group.rank(), ranks=group.size())


def size(value: Any) -> int:
    """Bytes of a tensor, or of lists of them."""
    return value.nbytes if isinstance(value, Tensor) else sum(size(part) for part in value)


def ring_reduce(name: str) -> Rule:
    def rule(given: Mapping[str, Any], at: Place) -> Moved:
        amount = 2 * size(given[name]) * (at.ranks - 1) / at.ranks
        return Moved(amount, amount)

    return rule


def own_slice(name: str) -> Rule:
    """`name` is one rank's slice: each of the others gets it, or has a part in it."""

    def rule(given: Mapping[str, Any], at: Place) -> Moved:
        amount = size(given[name]) * (at.ranks - 1)
        return Moved(amount, amount)

    return rule


def whole_array(name: str) -> Rule:
    """`name` is the slices of all ranks: all but one's own move."""

    def rule(given: Mapping[str, Any], at: Place) -> Moved:
        amount = size(given[name]) * (at.ranks - 1) / at.ranks
        return Moved(amount, amount)

    return rule


def from_root(name: str, root: str = "root_rank") -> Rule:
    """`name` is what each rank gets of the root."""

    def rule(given: Mapping[str, Any], at: Place) -> Moved:
        amount = size(given[name])
        return Moved(amount * (at.ranks - 1), 0) if at.rank == given[root] else Moved(0, amount)

    return rule


def to_root(name: str) -> Rule:
    """`name` is what each rank gives the root."""

    def rule(given: Mapping[str, Any], at: Place) -> Moved:
        amount = size(given[name])
        return Moved(0, amount * (at.ranks - 1)) if at.rank == given["root_rank"] else Moved(amount, 0)

    return rule


def exchanged(given: Mapping[str, Any], at: Place) -> Moved:
    """Lists with a piece for each rank."""
    sent, received = given["input_tensors"], given["output_tensors"]
    return Moved(size(sent) - size(sent[at.rank]), size(received) - size(received[at.rank]))


def split(sent: str, received: str) -> Rule:
    """Arrays cut along their first dim into a piece for each rank, equal ones where no splits are given."""

    def of(given: Mapping[str, Any], name: str, splits: str, at: Place) -> float:
        pieces = given[splits] or [1] * at.ranks
        return size(given[name]) * (1 - pieces[at.rank] / sum(pieces)) if sum(pieces) else 0

    def rule(given: Mapping[str, Any], at: Place) -> Moved:
        leaving = of(given, sent, "input_split_sizes", at)
        if received not in given:  # a functional one makes its output
            rows = sum(given["output_split_sizes"]), sum(given["input_split_sizes"])
            row = size(given[sent]) / rows[1] if rows[1] else 0
            return Moved(leaving, row * (rows[0] - given["output_split_sizes"][at.rank]))
        return Moved(leaving, of(given, received, "output_split_sizes", at))

    return rule


def sends(name: str) -> Rule:
    return lambda given, at: Moved(size(given[name]), 0)


def receives(name: str) -> Rule:
    return lambda given, at: Moved(0, size(given[name]))


# By the names of torch's operators and of their arguments. A barrier carries nothing.
KINDS: dict[str, tuple[str, Rule]] = {
    "c10d::allreduce_": ("all_reduce", ring_reduce("tensors")),
    "c10d::allreduce_coalesced_": ("all_reduce", ring_reduce("tensors")),
    "c10d::allgather_": ("all_gather", own_slice("input_tensors")),
    "c10d::_allgather_base_": ("all_gather", own_slice("input_tensor")),
    "c10d::allgather_coalesced_": ("all_gather", own_slice("input_list")),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", own_slice("inputs")),
    "c10d::reduce_scatter_": ("reduce_scatter", own_slice("output_tensors")),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", own_slice("output_tensor")),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", own_slice("outputs")),
    "c10d::broadcast_": ("broadcast", from_root("tensors")),
    "c10d::scatter_": ("scatter", from_root("output_tensors")),
    "c10d::reduce_": ("reduce", to_root("tensors")),
    "c10d::gather_": ("gather", to_root("input_tensors")),
    "c10d::alltoall_": ("all_to_all", exchanged),
    "c10d::alltoall_base_": ("all_to_all", split("input", "output")),
    "c10d::send": ("send", sends("tensors")),
    "c10d::recv_": ("send", receives("tensors")),
    "c10d::recv_any_source_": ("send", receives("tensors")),
    "_c10d_functional::all_reduce": ("all_reduce", ring_reduce("input")),
    "_c10d_functional::all_reduce_": ("all_reduce", ring_reduce("input")),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", ring_reduce("inputs")),
    "_c10d_functional::all_reduce_coalesced_": ("all_reduce", ring_reduce("inputs")),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", own_slice("input")),
    "_c10d_functional::all_gather_into_tensor_out": ("all_gather", own_slice("input")),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", own_slice("inputs")),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", whole_array("input")),
    "_c10d_functional::reduce_scatter_tensor_out": ("reduce_scatter", whole_array("input")),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", whole_array("inputs")),
    "_c10d_functional::broadcast": ("broadcast", from_root("input", "src")),
    "_c10d_functional::broadcast_": ("broadcast", from_root("input", "src")),
    "_c10d_functional::all_to_all_single": ("all_to_all", split("input", "output")),
    "_dtensor::shard_dim_alltoall": ("all_to_all", whole_array("input")),
}
COLLECTIVES = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::", "symm_mem::", "_dtensor::")
# Waits, barriers, checks, and what only names or wraps a tensor.
WITHOUT_BYTES = {
    "c10d::barrier", "c10d::monitored_barrier_", "c10d::check_for_nan",
    "_c10d_functional::_wrap_tensor_autograd", "_c10d_functional::wait_tensor",
    "_c10d_functional_autograd::wait_tensor", "_dtensor::mesh_get_process_group",
}  # fmt: skip
NAMES = tuple(dict.fromkeys(kind for kind, _ in KINDS.values()))
