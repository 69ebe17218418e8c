"""The loss and metrics over held-out samples without gradients, for training and for inference."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hpc_parallel.data.sampler import Batches, to_device
from hpc_parallel.problems import ConfigError
from hpc_parallel.record.values import finite
from hpc_parallel.strategies.exchange import all_gather
from hpc_parallel.strategies.loss import WithMetrics

PREFIX = "validation_"
TERMS = "number of terms"  # no name of a metric has spaces


def validate(
    evaluate: Callable[[Tensor, Tensor], Tensor],
    batches: Batches,
    *,
    count: int,
    device: torch.device,
    evaluation: WithMetrics,
) -> dict[str, float | None]:
    """Returns the means over the first `count` samples on all ranks, by their keys in a metrics line.

    Each sample counts once: all ranks add up their sums and their terms, and divide once. Samples that fill
    the last global batch do not count.
    `validation_loss` is always present. None stands for a mean that is not finite. `evaluation`: the loss
    function of `evaluate`, which knows the names of the metrics on the ranks that compute them.

    Raises ConfigError on all ranks if no target counts.
    """
    sums = []
    for step in range(-(-count // batches.global_batch_size)):
        evaluation.begin_batch(batches.counted(step, count=count))
        sums.append(evaluate(*to_device(batches.at(step), device)).reshape(-1))
    local = torch.stack(sums).double().sum(0).tolist()
    names = ("loss", TERMS, *evaluation.names)[: len(local)]
    # JSON has no infinity, so numbers are sent as strings
    by_rank = all_gather({name: repr(value) for name, value in zip(names, local, strict=True)}, device=device)
    keys = dict.fromkeys(name for values in by_rank for name in values)
    totals = {name: sum(float(values.get(name, 0)) for values in by_rank) for name in keys}
    terms = totals.pop(TERMS)
    if not terms:
        raise ConfigError([
            f"all targets of the {count} held-out samples are ignored, so there is no validation loss. Hold "
            "out other samples, raise training.validation_samples, or set training.validate_every=null."
        ])  # fmt: skip
    return {f"{PREFIX}{name}": finite(total / terms) for name, total in totals.items()}
