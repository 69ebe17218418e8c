"""The distance between the logits of a whole text and those with cached keys and values."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hpc_parallel.config.task_schema import GenerateConfig
from hpc_parallel.strategies import exchange
from hpc_parallel.training.nonfinite import NonFiniteError
from hpc_parallel.worker.generation import chooser, require_finite, shares_of_norm


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


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_nan_logits_choose_no_token(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """argmax returns the index of a NaN: with weights that are NaN, a text of token 0 without a word."""
    choose = chooser(GenerateConfig(temperature=temperature), seed=0, prompts=[4, 6])
    chosen = choose(torch.tensor([[0.0, 90.0, -math.inf], [0.0, math.nan, 5.0]]), position=3)
    assert chosen.tolist() == [1, -1]
    weights = {name: nn.Parameter(torch.ones(2)) for name in ("stem.weight", "blocks.10.w", "blocks.2.w")}
    monkeypatch.setattr(exchange, "all_gather", lambda value: [value])
    require_finite(torch.tensor([[7, 1], [7, 2]]), [4, 6], parameters=weights)
    for name in ("blocks.10.w", "blocks.2.w"):
        weights[name].data[1] = math.nan
    with pytest.raises(
        NonFiniteError, match=r"logits after prompt 7 are NaN.*weight blocks\.2\.w is not finite"
    ):
        require_finite(torch.stack([torch.tensor([7, 1]), chosen]), [4, 6], parameters=weights)
