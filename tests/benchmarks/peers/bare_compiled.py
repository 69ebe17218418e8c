"""The bare loop with all of the model compiled."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tests.benchmarks.peers.bare_ddp import loop
from tests.benchmarks.peers.recipe import Recipe


def build(recipe: Recipe) -> Callable[[int], Tensor]:
    replica = DistributedDataParallel(recipe.model(), gradient_as_bucket_view=True)
    return loop(recipe, torch.compile(replica))  # so that torch can split the graph at the buckets
