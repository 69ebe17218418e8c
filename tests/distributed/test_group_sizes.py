"""How often weights are gathered and small gradients are added up, counted in real steps."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import Parameter

from hpc_parallel.layout.exchanges import ALL_GATHER
from hpc_parallel.strategies.gradients import local_gradients
from tests.distributed.test_parity import LAYOUTS
from tests.parity import COMMON, TIED
from tests.workers import Train, Workers


def summed_norms() -> tuple[list[Tensor], int]:
    """Three gradients that are partial sums, added up; and the all-reduces that took."""
    axis = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    weights = []
    for index, size in enumerate((3, 4, 5)):
        weight = Parameter(DTensor.from_local(torch.zeros(size), axis, [Replicate()], run_check=False))
        gradient = torch.full((size,), float(10**index * (dist.get_rank() + 1)))
        weight.grad = DTensor.from_local(gradient, axis, [Partial()], run_check=False)
        weights.append(weight)
    calls, original = Counter[str](), dist.all_reduce

    def counted(*arguments: object, **options: object) -> object:
        calls["all_reduce"] += 1
        return original(*arguments, **options)  # type: ignore[arg-type]

    dist.all_reduce = counted  # type: ignore[assignment]
    try:
        return local_gradients(weights), calls["all_reduce"]
    finally:
        dist.all_reduce = original


def test_partial_gradients_of_whole_weights_are_added_up_at_once(workers: Workers) -> None:
    for gradients, calls in workers.run(2, summed_norms):
        assert [gradient.tolist() for gradient in gradients] == [[3.0] * 3, [30.0] * 4, [300.0] * 5]
        assert calls == 1


def test_a_stage_gathers_its_weights_once_a_step(trained: Train) -> None:
    """With 8 microbatches as with 2, on the first stage."""
    words, shard = (*COMMON, *TIED, *LAYOUTS["pipeline 2 x shard 2"]), (0, 1)
    runs = [trained(*words, *more) for more in ((), ("strategy.microbatches=8",))]
    few, many = (run.collectives[ALL_GATHER, shard] for run in runs)
    assert few == many > 0
