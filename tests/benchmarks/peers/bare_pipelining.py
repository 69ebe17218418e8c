"""torch.distributed.pipelining by hand: one stage on each rank, 1F1B, the norm summed over the stages."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from tests.benchmarks.peers.plain_transformer import cross_entropy
from tests.benchmarks.peers.recipe import Recipe


def build(recipe: Recipe) -> Callable[[int], Tensor]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layers = recipe.shape["layers"]
    model = recipe.model(first=rank * layers // ranks, last=(rank + 1) * layers // ranks)
    stage = PipelineStage(model, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, recipe.microbatches, loss_fn=cross_entropy)
    optimizer = recipe.optimizer(model)
    weights = list(model.parameters())

    def step(index: int) -> Tensor:
        for group in optimizer.param_groups:
            group["lr"] = recipe.rates[index]
        inputs, targets = recipe.batches[index]
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=losses)
        squared = torch.nn.utils.get_total_norm([weight.grad for weight in weights]).square()
        dist.all_reduce(squared)
        torch.nn.utils.clip_grads_with_norm_(weights, recipe.clip_norm, squared.sqrt())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        # As a mean over ranks, of which the last alone has the loss.
        return torch.stack(losses).mean().detach() * ranks if losses else torch.zeros(())

    return step
