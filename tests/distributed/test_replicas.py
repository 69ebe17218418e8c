"""Four ranks, two replicas of two slices: a changed weight is found by the ranks that hold the same."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from hpc_parallel.strategies.exchange import FollowerError
from hpc_parallel.training import replicas
from tests.workers import Workers


def outcome(victim: int, name: str, step: int, kinds: list[str], tensor_ranks: list[int]) -> str | None:
    """What the comparison raises on this rank if `victim` has another value of the weight `name`."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2))
    local = torch.arange(3.0) + rank % 2
    shards = DTensor.from_local(local, mesh, [Replicate(), Shard(0)], run_check=False)
    weights = {"stem.norm": torch.ones(3), "blocks.0.shards": shards, "head.weight": torch.ones(3)}
    if rank == victim:
        changed = weights[name]
        changed = changed.to_local() if isinstance(changed, DTensor) else changed
        changed[1].add_(1e-6)
    with mock.patch.object(replicas, "kind_of", return_value=kinds[rank]):
        compared = replicas.ReplicaCheck(weights, tensor_rank=tensor_ranks[rank], device=torch.device("cpu"))
    try:
        compared.check(step)
    except (replicas.ReplicaError, FollowerError) as error:
        return f"{type(error).__name__}: {error}"
    return None


ALIKE, MIXED, ONE = ["H100"] * 4, ["H100", "H100", "A100", "A100"], [0] * 4


@pytest.mark.parametrize(
    ("victim", "name", "step", "kinds", "tensor_ranks", "reference"),
    [
        (-1, "", 4, ALIKE, ONE, None),
        (2, "head.weight", 4, ALIKE, ONE, 0),
        (3, "blocks.0.shards", 4, ALIKE, ONE, 1),  # rank 0 and 2 have the other slice
        (0, "stem.norm", 4, ALIKE, ONE, 1),
        (1, "stem.norm", 4, ALIKE, [0, 1, 0, 1], 3),  # which of two is wrong can't be known
        (2, "head.weight", 4, MIXED, ONE, None),
        (2, "head.weight", 0, MIXED, ONE, 0),
    ],
)
def test_a_changed_weight_is_named(
    workers: Workers, victim: int, name: str, step: int, kinds: list[str], tensor_ranks: list[int],
    reference: int | None,
) -> None:  # fmt: skip
    outcomes = workers.run(4, outcome, victim, name, step, kinds, tensor_ranks)
    if reference is None:
        assert outcomes == [None] * 4
        return
    if victim < reference and len(set(tensor_ranks)) > 1:
        victim, reference = reference, victim  # of two replicas the later one is accused
    when = f"after step {step}" if step else "before the first step"
    message = f"{name} is not that of rank {reference}, its replica, {when}"
    expected = [f"FollowerError: ended with rank {victim}: {message}"] * 4
    expected[victim] = f"ReplicaError: {message}"
    assert outcomes == expected
