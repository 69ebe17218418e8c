"""The loss and metrics over held-out samples without gradients, for training and for inference."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hpc_parallel.data.sampler import Batches, to_device
from hpc_parallel.record.values import finite
from hpc_parallel.strategies.exchange import all_gather
from hpc_parallel.strategies.loss import WithMetrics

PREFIX = "validation_"


def validate(
    evaluate: Callable[[Tensor, Tensor], Tensor],
    batches: Batches,
    *,
    steps: int,
    device: torch.device,
    evaluation: WithMetrics,
) -> dict[str, float | None]:
    """Returns the means over the first `steps` global batches on all ranks, by their keys in a metrics line.

    `validation_loss` is always present. None stands for a mean that is not finite. `evaluation`: the loss
    function of `evaluate`, which knows the names of the metrics on the ranks that compute them.
    """
    values = [evaluate(*to_device(batches.at(step), device)).reshape(-1) for step in range(steps)]
    means = torch.stack(values).double().mean(0).tolist()
    names = ("loss", *evaluation.names)[: len(means)]
    # JSON has no infinity, so numbers are sent as strings
    by_rank = all_gather({name: repr(mean) for name, mean in zip(names, means, strict=True)}, device=device)
    keys = dict.fromkeys(name for means in by_rank for name in means)
    totals = {name: sum(float(means.get(name, 0)) for means in by_rank) for name in keys}
    return {f"{PREFIX}{name}": finite(total / batches.replicas) for name, total in totals.items()}
