"""Two processes that train for themselves, each on its half of the batch, without a word between them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tests.benchmarks.peers.bare_ddp import loop
from tests.benchmarks.peers.recipe import Recipe


def build(recipe: Recipe) -> Callable[[int], Tensor]:
    return loop(recipe, recipe.model())
