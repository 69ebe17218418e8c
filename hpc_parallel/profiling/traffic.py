"""Counts the bytes that each collective of a step sends and receives with its best algorithm.

The bytes are counted where torch dispatches collectives. The collectives of DistributedDataParallel, DTensor
and pipelines are therefore included. The counts are those of ring algorithms (NVIDIA nccl-tests,
PERFORMANCE.md): for n ranks and an entire array of S bytes, an all-reduce moves 2 (n-1)/n S through each
rank, and an all-gather or reduce-scatter moves (n-1)/n S. A backend may move more: gloo runs a reduce-scatter
as an all-reduce.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from hpc_parallel.strategies import expert
from hpc_parallel.strategies.context import ring
from hpc_parallel.torch_internals import DispatchMode, group_of, operator_arguments, operator_name

SENDING = ring.OPERATORS | expert.OPERATORS
"""Operators that send, and what each runs."""


class Moved(NamedTuple):
    """Bytes that one rank sends and receives."""

    sent: float
    received: float


class GroupPosition(NamedTuple):
    """This rank's position in a process group."""

    rank: int
    ranks: int


Rule = Callable[[Mapping[str, Any], GroupPosition], Moved]


class Traffic(DispatchMode):
    """While active, counts the bytes that this rank moves, by kind of collective."""

    supports_higher_order_operators = True  # compiled code calls some

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.unknown: set[str] = set()  # operators whose bytes can't be counted

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled blocks stay compiled; their collectives are counted when they run."""
        return True

    def _count(self, kind: str, moved: Moved, group: ProcessGroup) -> None:
        """Count the bytes that one call over `group` moved."""
        self.sent[kind] += round(moved.sent)
        self.received[kind] += round(moved.received)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then dispatches its local operators and collectives
        name = operator_name(function) or ""
        if name in KINDS:
            try:
                arguments = operator_arguments(function, args, kwargs)
                kind, rule = KINDS[name]
                self._count(kind, rule(arguments, place_of(arguments)), _group(arguments))
            except Exception:  # arguments of another torch
                self.unknown.add(name)
        elif name.startswith(COLLECTIVES) and name not in WITHOUT_BYTES:
            self.unknown.add(name)
        if function in SENDING:  # else this mode would not see what they send
            with self:
                return SENDING[function](*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def _group(arguments: Mapping[str, Any]) -> ProcessGroup:
    """The process group of a collective. An argument of the collective is the group or its name."""
    return group_of(arguments["process_group"] if "process_group" in arguments else arguments["group_name"])


def place_of(arguments: Mapping[str, Any]) -> GroupPosition:
    group = _group(arguments)
    return GroupPosition(rank=group.rank(), ranks=group.size())


def bytes_of(value: Any) -> int:
    """Bytes of a tensor, or of nested lists of tensors."""
    return value.nbytes if isinstance(value, Tensor) else sum(bytes_of(part) for part in value)


def both_ways(name: str, amount: Callable[[int, int], float]) -> Rule:
    """Each rank sends and receives `amount` of (bytes of the argument `name`, number of ranks)."""

    def rule(arguments: Mapping[str, Any], place: GroupPosition) -> Moved:
        moved = amount(bytes_of(arguments[name]), place.ranks)
        return Moved(moved, moved)

    return rule


def ring_reduce(name: str) -> Rule:
    return both_ways(name, lambda size, ranks: 2 * size * (ranks - 1) / ranks)


def local_slice(name: str) -> Rule:
    """Argument `name` is one rank's slice: every other rank receives it, or contributes to it."""
    return both_ways(name, lambda size, ranks: size * (ranks - 1))


def all_slices(name: str) -> Rule:
    """Argument `name` holds the slices of all ranks. All of them move except this rank's slice."""
    return both_ways(name, lambda size, ranks: size * (ranks - 1) / ranks)


def from_root(name: str, root: str = "root_rank") -> Rule:
    """Argument `name` is what each rank receives from the root."""

    def rule(arguments: Mapping[str, Any], place: GroupPosition) -> Moved:
        amount = bytes_of(arguments[name])
        is_root = place.rank == arguments[root]
        return Moved(amount * (place.ranks - 1), 0) if is_root else Moved(0, amount)

    return rule


def to_root(name: str) -> Rule:
    """Argument `name` is what each rank sends to the root."""

    def rule(arguments: Mapping[str, Any], place: GroupPosition) -> Moved:
        received, sent = from_root(name)(arguments, place)
        return Moved(sent, received)

    return rule


def exchanged(arguments: Mapping[str, Any], place: GroupPosition) -> Moved:
    """The arguments are lists with one tensor for each rank."""
    sent, received = arguments["input_tensors"], arguments["output_tensors"]
    return Moved(
        bytes_of(sent) - bytes_of(sent[place.rank]), bytes_of(received) - bytes_of(received[place.rank])
    )


def split(sent: str, received: str) -> Rule:
    """Arrays are split along their first dim into one piece for each rank; pieces are equal by default."""

    def moved_bytes(arguments: Mapping[str, Any], name: str, splits: str, place: GroupPosition) -> float:
        pieces = arguments[splits] or [1] * place.ranks
        return bytes_of(arguments[name]) * (1 - pieces[place.rank] / sum(pieces)) if sum(pieces) else 0

    def rule(arguments: Mapping[str, Any], place: GroupPosition) -> Moved:
        sent_bytes = moved_bytes(arguments, sent, "input_split_sizes", place)
        if received not in arguments:  # a functional collective allocates its output
            rows, input_rows = arguments["output_split_sizes"], sum(arguments["input_split_sizes"])
            row_bytes = bytes_of(arguments[sent]) / input_rows if input_rows else 0
            return Moved(sent_bytes, row_bytes * (sum(rows) - rows[place.rank]))
        return Moved(sent_bytes, moved_bytes(arguments, received, "output_split_sizes", place))

    return rule


def sends(name: str) -> Rule:
    return lambda arguments, place: Moved(bytes_of(arguments[name]), 0)


def receives(name: str) -> Rule:
    return lambda arguments, place: Moved(0, bytes_of(arguments[name]))


# Keys are operators of torch and of strategies/expert.py. Each rule names an argument of its operator.
KINDS: dict[str, tuple[str, Rule]] = {
    "c10d::allreduce_": ("all_reduce", ring_reduce("tensors")),
    "c10d::allreduce_coalesced_": ("all_reduce", ring_reduce("tensors")),
    "c10d::allgather_": ("all_gather", local_slice("input_tensors")),
    "c10d::_allgather_base_": ("all_gather", local_slice("input_tensor")),
    "c10d::allgather_coalesced_": ("all_gather", local_slice("input_list")),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", local_slice("inputs")),
    "c10d::reduce_scatter_": ("reduce_scatter", local_slice("output_tensors")),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", local_slice("output_tensor")),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", local_slice("outputs")),
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
    "_c10d_functional::all_gather_into_tensor": ("all_gather", local_slice("input")),
    "_c10d_functional::all_gather_into_tensor_out": ("all_gather", local_slice("input")),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", local_slice("inputs")),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", all_slices("input")),
    "_c10d_functional::reduce_scatter_tensor_out": ("reduce_scatter", all_slices("input")),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", all_slices("inputs")),
    "_c10d_functional::broadcast": ("broadcast", from_root("input", "src")),
    "_c10d_functional::broadcast_": ("broadcast", from_root("input", "src")),
    "_c10d_functional::all_to_all_single": ("all_to_all", split("input", "output")),
    "_dtensor::shard_dim_alltoall": ("all_to_all", all_slices("input")),
    "hpc_parallel::exchange_counts": ("all_to_all", all_slices("counts")),
}
# The last ones run other operators, which this mode does not see.
COLLECTIVES = (
    "c10d::", "_c10d_functional::", "_c10d_functional_autograd::", "symm_mem::", "_dtensor::",
    "higher_order::",
)  # fmt: skip
# Waits, barriers, checks, operators that only name or wrap a tensor, and those that keep the state of a
# generator of random numbers.
WITHOUT_BYTES = {
    "c10d::barrier", "c10d::monitored_barrier_", "c10d::check_for_nan",
    "_c10d_functional::_wrap_tensor_autograd", "_c10d_functional::wait_tensor",
    "_c10d_functional_autograd::wait_tensor", "_dtensor::mesh_get_process_group",
    "higher_order::run_and_save_rng_state", "higher_order::run_with_rng_state",
    "higher_order::graphsafe_run_with_rng_state",
}  # fmt: skip
NAMES = tuple(dict.fromkeys(kind for kind, _ in KINDS.values()))
