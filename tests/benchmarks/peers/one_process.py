"""One process alone on its half of the batch: the other one waits."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from tests.benchmarks.peers.bare_ddp import loop
from tests.benchmarks.peers.recipe import Recipe


def build(recipe: Recipe) -> Callable[[int], Tensor]:
    if dist.get_rank():
        return lambda index: torch.tensor(float("nan"))
    return loop(recipe, recipe.model())
