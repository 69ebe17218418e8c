"""The loss over held-out samples without gradients, for training and for inference."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hpc_parallel.data.sampler import Batches, to_device
from hpc_parallel.record.values import finite
from hpc_parallel.strategies.exchange import all_gather_numbers


def mean_loss(
    evaluate: Callable[[Tensor, Tensor], Tensor], batches: Batches, *, steps: int, device: torch.device
) -> float | None:
    """Returns the mean loss of the first `steps` global batches on all ranks; None if it is not finite."""
    losses = [evaluate(*to_device(batches.at(step), device)) for step in range(steps)]
    (shares,) = all_gather_numbers([torch.stack(losses).double().mean().item()], device=device)
    return finite(sum(shares) / batches.replicas)
