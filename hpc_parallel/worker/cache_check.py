"""Checks that cached keys and values give the same logits as the whole text, on the weights of the run."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.strategies import exchange
from hpc_parallel.strategies.decode import Decoder
from hpc_parallel.strategies.model_checks import is_own
from hpc_parallel.strategies.precision import HALF, WEIGHTS
from hpc_parallel.worker.verify import DifferenceError

CACHED = 3  # tokens after which the cache is compared with the whole text


class CacheCheck:
    """Compares logits that follow cached positions with those of the whole text, on the run's own weights.

    The comparison at the start has random weights and few blocks, which may hide a difference that the run's
    weights show.
    """

    def __init__(self, decoder: Decoder, *, config: RunConfig) -> None:
        self._decoder = decoder
        self._config = config
        self._latest: Tensor | None = None  # on the rank that chooses

    def kept(self, logits: Tensor) -> Tensor:
        """Keep `logits` for the comparison, and return them."""
        self._latest = logits
        return logits

    def __call__(self, tokens: Tensor) -> None:
        """Compute `tokens` [batch, seq] from the start, and compare their last logits with the kept ones.

        The cache has the same positions before and after. Raises DifferenceError on all ranks.
        """
        if not is_own(self._config) or self._config.strategy.verify == "never":
            return
        cached = self._latest
        self._decoder.rewind()
        self._decoder(tokens, lambda logits: self.kept(logits).argmax(dim=-1))
        off = max(map(float, exchange.all_gather(repr(_distance(cached, self._latest)))))
        precision = self._config.training.precision
        if not off <= torch.finfo(HALF.get(precision, WEIGHTS[precision])).eps ** 0.5:
            name = self._config.model["_target_"].rpartition(".")[2]
            raise DifferenceError([
                f"{name} computes something else with cached keys and values than from the whole text: at "
                f"position {tokens.shape[1]}, logits are off by {off:.1g} of their norm. It mixes positions "
                "outside of CausalAttention (docs/own-model.md), so task=generate can't be used."
            ])  # fmt: skip


def _distance(cached: Tensor | None, whole: Tensor | None) -> float:
    """The relative distance; infinity if it is not finite, and 0 on a rank without logits."""
    if cached is None or whole is None:
        return 0.0
    distance = float((cached.double() - whole.double()).norm() / whole.double().norm())
    return distance if math.isfinite(distance) else math.inf
