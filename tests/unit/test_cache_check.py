"""The distance between the logits of a whole text and those with cached keys and values."""

from __future__ import annotations

import math

import torch

from hpc_parallel.worker.cache_check import shares_of_norm


def test_the_distance_is_a_share_of_the_norm() -> None:
    """An entry that both exclude counts in neither; what only one excludes, and NaN, is infinitely far."""
    whole = torch.tensor(
        [[3.0, 4.0, 0.0], [3.0, 4.0, -torch.inf], [0.0, 0.0, 0.0], [3.0, 4.0, 0.0], [3.0, 4.0, 0.0]]
    )
    cached = torch.tensor(
        [
            [3.0, 4.0, 1.0],
            [3.0, 4.5, -torch.inf],
            [0.0, 0.0, 0.0],
            [3.0, -torch.inf, 0.0],
            [3.0, math.nan, 0.0],
        ]
    )
    assert shares_of_norm(whole, cached).tolist() == [0.2, 0.1, 0.0, math.inf, math.inf]
