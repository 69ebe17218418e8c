"""The bare loop: fused AdamW, one clip, and what each entry makes of the model."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.benchmarks.peers.plain_transformer import cross_entropy
from tests.benchmarks.peers.recipe import Recipe


def build(recipe: Recipe) -> Callable[[int], Tensor]:
    """DistributedDataParallel with views of its buckets."""
    return loop(recipe, replica(recipe))


def compiled(recipe: Recipe) -> Callable[[int], Tensor]:
    """All of the model compiled, so that torch can split the graph at the buckets."""
    return loop(recipe, torch.compile(replica(recipe)))


def one_process(recipe: Recipe) -> Callable[[int], Tensor]:
    """One process alone on its half of the batch: the other one waits."""
    return apart(recipe) if dist.get_rank() == 0 else lambda index: torch.tensor(float("nan"))


def apart(recipe: Recipe) -> Callable[[int], Tensor]:
    """Processes that train for themselves, each on its half of the batch, without a word between them."""
    return loop(recipe, recipe.model())


def replica(recipe: Recipe) -> nn.Module:
    return DistributedDataParallel(recipe.model(), gradient_as_bucket_view=True)


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
