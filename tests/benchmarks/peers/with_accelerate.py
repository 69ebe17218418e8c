"""Hugging Face accelerate."""

from __future__ import annotations

from collections.abc import Callable

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor

from tests.benchmarks.peers.plain_transformer import cross_entropy
from tests.benchmarks.peers.recipe import Recipe


def build(recipe: Recipe) -> Callable[[int], Tensor]:
    views = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    accelerator = Accelerator(cpu=True, mixed_precision="no", kwargs_handlers=[views])
    plain = recipe.model()
    model, optimizer = accelerator.prepare(plain, recipe.optimizer(plain))

    def step(index: int) -> Tensor:
        for group in optimizer.param_groups:
            group["lr"] = recipe.rates[index]
        inputs, targets = recipe.batches[index]
        loss = cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), recipe.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
