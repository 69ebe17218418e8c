"""Attention in both directions: the formula, and what can't be done with it."""

from __future__ import annotations

import math

import pytest
import torch

from hpc_parallel.models.attention import CausalAttention, FullAttention
from hpc_parallel.strategies import cache
from tests.models import Encoder


@pytest.mark.parametrize("attention", [CausalAttention(), FullAttention()])
def test_it_is_the_formula(attention: CausalAttention | FullAttention) -> None:
    random = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 5, 6, dtype=torch.float64, generator=random)
    key, value = torch.randn(2, 2, 2, 5, 6, dtype=torch.float64, generator=random)
    keys, values = (tensor.repeat_interleave(2, dim=1) for tensor in (key, value))
    scores = query @ keys.mT / math.sqrt(6)
    if attention.causal:
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    wanted = scores.softmax(-1) @ values
    torch.testing.assert_close(attention(query, key, value), wanted, rtol=0, atol=1e-12)


def test_attention_in_both_directions_counts_all_pairs() -> None:
    """2 FLOPs for each weight and token; 4 of each pair of positions for each of 8 columns of the heads."""
    with torch.device("meta"):
        model = Encoder(layers=2, dim=8, heads=2, kv_heads=2, ffn_dim=8, vocab_size=8)
    weights = 4 * 8 * 8 + 3 * 8 * 8
    assert model.forward_flops((16,)).blocks == (2 * 16 * weights + 4 * 16**2 * 8,) * 2


def test_an_encoder_does_not_generate() -> None:
    with torch.device("meta"):
        model = Encoder(layers=1, dim=8, heads=2, kv_heads=2, ffn_dim=8, vocab_size=8)
    assert list(map(str, cache.find_problems(model))) == [
        "task = generate can't be used: Encoder has FullAttention, which sees later tokens. Try task=infer."
    ]
