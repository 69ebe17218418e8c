"""Lightning Fabric with its DDP strategy."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments import TorchElasticEnvironment
from lightning_fabric.strategies import DDPStrategy
from torch import Tensor

from tests.benchmarks.peers.plain_transformer import cross_entropy
from tests.benchmarks.peers.recipe import Recipe


def build(recipe: Recipe) -> Callable[[int], Tensor]:
    strategy = DDPStrategy(
        cluster_environment=TorchElasticEnvironment(),
        process_group_backend="gloo",
        gradient_as_bucket_view=True,
    )
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, precision="32-true")
    fabric.launch()
    plain = recipe.model()
    model, optimizer = fabric.setup(plain, recipe.optimizer(plain))

    def step(index: int) -> Tensor:
        for group in optimizer.param_groups:
            group["lr"] = recipe.rates[index]
        inputs, targets = recipe.batches[index]
        loss = cross_entropy(model(inputs), targets)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=recipe.clip_norm, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
