"""The bytes of weights, gradients and optimizer state that each rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor
from torch.nn import Parameter

from hpc_parallel.models.drawn_weights import local_of
from hpc_parallel.strategies import exchange
from hpc_parallel.training.optimizer import ModelOptimizer


def local_bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of `tensors` that this rank holds; for a DTensor, the bytes of the local shard."""
    return sum(local_of(tensor).nbytes for tensor in tensors)


def held_bytes(parameters: Sequence[Parameter]) -> dict[str, int]:
    """The bytes of this rank's `parameters` and of their `gradients`."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return {"parameters": local_bytes(parameters), "gradients": local_bytes(gradients)}


def state_by_rank(held_bytes: Mapping[str, int], optimizer: ModelOptimizer) -> list[dict[str, int]] | None:
    """`rank_state_bytes` of `summary.json`; None if this start has trained no step.

    `held_bytes`: `Step.held_bytes`. Returns the same on all ranks, which must call it together.
    """
    if not held_bytes:
        return None
    return exchange.all_gather({**held_bytes, "optimizer": local_bytes(optimizer.state().values())})
