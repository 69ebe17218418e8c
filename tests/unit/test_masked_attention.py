"""Attention in both directions, with a bias and with a mask of keys, against the formula."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from hpc_parallel.models.attention import Attention, CausalAttention, FullAttention
from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.strategies import cache
from hpc_parallel.strategies.cache import CachedAttention, Past
from tests.models import Encoder

BATCH, HEADS, KV_HEADS, LENGTH, WIDTH = 2, 4, 2, 6, 3


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def slopes() -> Tensor:
    return torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)


def alibi(queries: Tensor, keys: Tensor) -> Tensor:
    """-slope x distance (Press et al. 2022)."""
    return -slopes()[:, None, None] * (queries[:, None] - keys).abs()


def by_the_formula(query: Tensor, key: Tensor, value: Tensor, *, kept: Tensor, causal: bool) -> Tensor:
    """Query by query, over the keys that it sees."""
    output = torch.zeros_like(query)
    for sample in range(BATCH):
        for head in range(HEADS):
            for place in range(LENGTH):
                seen = [k for k in range(LENGTH) if kept[sample, k] and (k <= place or not causal)]
                if not seen:
                    continue
                keys, values = (x[sample, head // (HEADS // KV_HEADS), seen] for x in (key, value))
                scores = keys @ query[sample, head, place] / WIDTH**0.5
                scores -= slopes()[head] * torch.tensor([abs(place - k) for k in seen], dtype=torch.float64)
                output[sample, head, place] = scores.softmax(0) @ values
    return output


@pytest.fixture
def inputs() -> tuple[Tensor, Tensor, Tensor]:
    return drawn(BATCH, HEADS, LENGTH, WIDTH), *(
        drawn(BATCH, KV_HEADS, LENGTH, WIDTH + n)[..., :WIDTH] for n in (0, 1)
    )


@pytest.fixture
def kept() -> Tensor:
    """Padding on the left of one sample and on the right of the other."""
    return torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]], dtype=torch.bool)


@pytest.mark.parametrize("attention", [CausalAttention(), FullAttention()])
def test_a_bias_and_a_mask_follow_the_formula(
    attention: Attention, inputs: tuple[Tensor, Tensor, Tensor], kept: Tensor
) -> None:
    output = attention(*inputs, bias=alibi, key_mask=kept)
    expected = by_the_formula(*inputs, kept=kept, causal=attention.causal)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    if attention.causal:
        assert not output[0, :, :2].any()  # they see no key


def test_a_bias_of_nothing_changes_nothing(inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    plain = CausalAttention()(*inputs)
    zero = CausalAttention()(*inputs, bias=lambda q, k: torch.zeros(1, len(q), len(k)))
    masked = CausalAttention()(*inputs, key_mask=torch.ones(BATCH, LENGTH, dtype=torch.bool))
    torch.testing.assert_close(zero, plain, rtol=0, atol=1e-12)
    torch.testing.assert_close(masked, plain, rtol=0, atol=1e-12)


def test_a_cache_continues_with_the_bias_and_the_mask(
    inputs: tuple[Tensor, Tensor, Tensor], kept: Tensor
) -> None:
    """A prompt of three positions, then one at a time."""
    past = Past()
    cached = CachedAttention(past, length=LENGTH)
    outputs = []
    for start, end in ((0, 3), (3, 4), (4, 5), (5, 6)):
        part = [x[:, :, start:end] for x in inputs]
        outputs.append(cached(*part, bias=alibi, key_mask=kept[:, start:end]))
        past.length += end - start
    expected = by_the_formula(*inputs, kept=kept, causal=True)
    torch.testing.assert_close(torch.cat(outputs, dim=2), expected, rtol=0, atol=1e-12)


FULL = torch.ones(BATCH, LENGTH, dtype=torch.bool)
PADDED_PROMPT = torch.tensor([[0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]], dtype=torch.bool)
PADDED_TOKEN = torch.tensor([[1, 1, 1, 1, 0, 1], [1, 1, 1, 1, 1, 1]], dtype=torch.bool)


def generated(
    cached: CachedAttention, past: Past, inputs: tuple[Tensor, ...], masks: Sequence[Tensor | None]
) -> Tensor:
    """Outputs of a prompt of four positions and of two tokens; `masks`: of each pass."""
    past.length, outputs = 0, []
    for (start, end), mask in zip(((0, 4), (4, 5), (5, 6)), masks, strict=True):
        part = [x[:, :, start:end] for x in inputs]
        outputs.append(cached(*part, key_mask=None if mask is None else mask[:, start:end]))
        past.length += end - start
    return torch.cat(outputs, dim=2)


@pytest.mark.parametrize(
    ("masks", "kept"),
    [
        ((PADDED_PROMPT, None, None), PADDED_PROMPT),
        ((PADDED_PROMPT, None, PADDED_PROMPT), PADDED_PROMPT),
        ((None, PADDED_TOKEN, None), PADDED_TOKEN),
    ],
)
def test_a_cache_keeps_the_masks_of_earlier_passes(
    inputs: tuple[Tensor, Tensor, Tensor], masks: tuple[Tensor | None, ...], kept: Tensor
) -> None:
    """A pass without a mask hides no key of its own. The next generation starts without masks."""
    past = Past()
    cached = CachedAttention(past, length=LENGTH)
    expected = CausalAttention()(*inputs, key_mask=kept)
    torch.testing.assert_close(generated(cached, past, inputs, masks), expected, rtol=0, atol=1e-12)
    unmasked = CausalAttention()(*inputs, key_mask=FULL)
    torch.testing.assert_close(generated(cached, past, inputs, [None] * 3), unmasked, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(HEADS // 2, LENGTH, LENGTH), (LENGTH, LENGTH), (1, LENGTH, 1)])
def test_a_bias_of_another_shape_is_refused(
    shape: tuple[int, ...], inputs: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Also one that would broadcast."""
    with pytest.raises(ValueError, match=r"The bias of an attention has the shape .* is needed"):
        CausalAttention()(*inputs, bias=lambda q, k: torch.zeros(shape))


def test_a_cache_takes_the_heads_of_its_device(inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    """As strategy.tensor splits them."""
    query, key, value = inputs
    block = nn.Sequential(CausalAttention())
    block[0].local_bias = lambda bias, heads: bias[:heads]
    model = LayeredModel(stem=nn.Identity(), blocks=[block], head=nn.Identity())
    cache.apply(model, length=LENGTH)
    (attention,) = (module for module in model.modules() if isinstance(module, CachedAttention))
    output = attention(query[:, :2], key[:, :1], value[:, :1], bias=alibi)
    expected = CausalAttention()(query, key, value, bias=alibi)[:, :2]
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)


def test_new_tokens_leave_out_the_kernel_that_plans_for_each_length(
    monkeypatch: pytest.MonkeyPatch, inputs: tuple[Tensor, Tensor, Tensor]
) -> None:
    allowed: list[bool] = []

    def noting(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Tensor:
        allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return query

    monkeypatch.setattr(cache, "attend", noting)
    past = Past()
    cached = CachedAttention(past, length=LENGTH)
    for places in (slice(0, 2), slice(2, 3)):
        cached(*(x[:, :, places] for x in inputs))
        past.length += places.stop - places.start
    assert allowed == [False]
    assert torch.backends.cuda.cudnn_sdp_enabled()  # for everything else, as before


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
