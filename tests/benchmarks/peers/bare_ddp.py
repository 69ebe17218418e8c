"""The bare loop: DistributedDataParallel with views of its buckets, fused AdamW, one clip."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.benchmarks.peers.plain_transformer import cross_entropy
from tests.benchmarks.peers.recipe import Recipe


def build(recipe: Recipe) -> Callable[[int], Tensor]:
    model = recipe.model()
    return loop(recipe, DistributedDataParallel(model, gradient_as_bucket_view=True))


def loop(recipe: Recipe, model: nn.Module) -> Callable[[int], Tensor]:
    """One step of `model`; returns its loss on this rank's samples."""
    optimizer = recipe.optimizer(model)
    weights = list(model.parameters())

    def step(index: int) -> Tensor:
        for group in optimizer.param_groups:
            group["lr"] = recipe.rates[index]
        inputs, targets = recipe.batches[index]
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, recipe.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
