"""The decoder against plain formulas in float64, and its sizes against the published ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hpc_parallel.config.places import find_folder
from hpc_parallel.models import transformer
from hpc_parallel.models.layered import materialise
from hpc_parallel.models.moe import MoeTransformer
from hpc_parallel.models.transformer import Attention, Transformer, rotate, rotation
from hpc_parallel.strategies.checkpointing import apply as apply_checkpointing

SHAPE: dict[str, Any] = {
    "layers": 3, "dim": 24, "heads": 6, "kv_heads": 2, "ffn_dim": 20, "vocab_size": 13
}  # fmt: skip


def build(dtype: torch.dtype = torch.float64, **changes: Any) -> Transformer:
    with torch.device("meta"):
        model = Transformer(**(SHAPE | changes))
    materialise(model, seed=1, device="cpu", dtype=dtype)
    with torch.no_grad():  # larger than at the start, so that attention is far from uniform
        for parameter in model.parameters():
            parameter.mul_(8.0 if parameter.dim() > 1 else 1.25)
    return model


def tokens(*shape: int, vocab_size: int = SHAPE["vocab_size"]) -> Tensor:
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(5))


def plain_attention(x: Tensor, layer: Attention, *, heads: int, kv_heads: int, theta: float) -> Tensor:
    """One head, one query at a time; positions as complex turns. x: [seq, dim]."""
    seq, _ = x.shape
    width = layer.query.out_features // heads

    def turned(vector: Tensor, position: int) -> Tensor:
        pairs = torch.complex(vector[: width // 2], vector[width // 2 :])
        angles = [position * theta ** (-2 * i / width) for i in range(width // 2)]
        turns = [complex(math.cos(angle), math.sin(angle)) for angle in angles]
        pairs = pairs * torch.tensor(turns, dtype=torch.complex128)
        return torch.cat((pairs.real, pairs.imag))

    def normed(vectors: Tensor, norm: torch.nn.RMSNorm | None) -> Tensor:
        if norm is None:
            return vectors
        rows = vectors.reshape(-1, width)
        roots = torch.tensor(
            [math.sqrt(sum(x * x for x in row.tolist()) / width + 1e-5) for row in rows], dtype=x.dtype
        )
        return (rows / roots[:, None] * norm.weight).reshape(vectors.shape)

    q, k, v = (x @ getattr(layer, name).weight.T for name in ("query", "key", "value"))
    q, k = normed(q, layer.query_norm), normed(k, layer.key_norm)
    result = torch.zeros(seq, heads * width, dtype=x.dtype)
    for head in range(heads):
        own = slice(head * width, (head + 1) * width)
        shared = head // (heads // kv_heads)
        theirs = slice(shared * width, (shared + 1) * width)
        for i in range(seq):
            query = turned(q[i, own], i)
            scores = torch.stack([query @ turned(k[j, theirs], j) for j in range(i + 1)]) / math.sqrt(width)
            weights = torch.exp(scores - scores.max())
            result[i, own] = (weights / weights.sum()) @ v[: i + 1, theirs]
    return result @ layer.output.weight.T


def plain_model(model: Transformer, row: Tensor, *, heads: int, kv_heads: int, theta: float) -> Tensor:
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight

    x = model.stem.weight[row]
    for block in model.blocks.values():
        normed = norm(x, block.attention_norm.weight)
        x = x + plain_attention(normed, block.attention, heads=heads, kv_heads=kv_heads, theta=theta)
        normed = norm(x, block.feed_forward_norm.weight)
        gate = normed @ block.feed_forward.gate.weight.T
        hidden = gate / (1 + torch.exp(-gate)) * (normed @ block.feed_forward.up.weight.T)
        x = x + hidden @ block.feed_forward.down.weight.T
    return norm(x, model.head.norm.weight) @ model.head.output.weight.T


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 6), (6, 2), (6, 1)])
@pytest.mark.parametrize("options", [{}, {"head_dim": 10}, {"head_dim": 6, "qk_norm": True}])
@torch.no_grad()
def test_model_is_the_plain_formula(heads: int, kv_heads: int, options: dict[str, Any]) -> None:
    model = build(heads=heads, kv_heads=kv_heads, rope_theta=50.0, tied_head=False, **options)
    rows = tokens(2, 9)
    expected = torch.stack(
        [plain_model(model, row, heads=heads, kv_heads=kv_heads, theta=50.0) for row in rows]
    )
    assert expected.std() > 0.5
    torch.testing.assert_close(model(rows), expected, rtol=1e-11, atol=1e-11)


def test_loss_is_the_sum_of_negative_log_probabilities() -> None:
    model = build()
    inputs, targets = tokens(2, 10)[:, :-1], tokens(2, 10)[:, 1:]
    logits = model(inputs).detach()
    expected = sum(
        math.log(sum(math.exp(z) for z in logits[b, t].tolist())) - logits[b, t, targets[b, t]].item()
        for b in range(2)
        for t in range(9)
    )
    assert model.loss(logits, targets).item() == pytest.approx(expected, rel=1e-12)
    assert model.loss(logits, targets).dtype == torch.float64
    assert model.loss(logits.bfloat16(), targets).dtype == torch.float32
    assert model.loss_terms(targets) == 18


def test_scores_depend_on_the_distance_only() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 8, dtype=torch.float64, generator=generator)
    turn = rotation(torch.arange(100_000), head_dim=8, theta=10000.0, like=query)

    def score(i: int, j: int) -> float:
        at = [rotate(v, (turn[0][p], turn[1][p])) for v, p in ((query, i), (key, j))]
        return (at[0] @ at[1]).item()

    for i, j in ((7, 0), (1007, 1000), (99_999, 99_992)):
        assert score(i, j) == pytest.approx(score(12, 5), abs=1e-9)
    assert abs(score(12, 4) - score(12, 5)) > 1e-3


def test_angles_are_exact_far_out() -> None:
    position, theta = 99_999, 500_000.0
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-7), (torch.bfloat16, 1e-7)):
        like = torch.empty(0, dtype=dtype)
        cos, sin = rotation(torch.tensor([position]), head_dim=4, theta=theta, like=like)
        angle = position / math.sqrt(theta)
        assert cos[0].tolist() == pytest.approx([math.cos(position), math.cos(angle)], abs=tolerance)
        assert sin[0].tolist() == pytest.approx([math.sin(position), math.sin(angle)], abs=tolerance)


@torch.no_grad()
def test_a_token_does_not_change_earlier_positions() -> None:
    model = build()
    row = tokens(1, 12)
    changed = row.clone()
    changed[0, 7] = (row[0, 7] + 1) % SHAPE["vocab_size"]
    before, after = model(row), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] - after[:, 7:]).abs().amax(-1).min() > 1e-6


def test_under_autocast_the_residual_stream_stays_float32() -> None:
    model = build(dtype=torch.float32)
    seen: list[torch.dtype] = []
    for block in model.blocks.values():
        block.register_forward_hook(lambda _m, _x, output: seen.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens(2, 8))
        loss = model.loss(logits, tokens(2, 8))
    assert seen == [torch.float32] * 3
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    loss.backward()
    exact = build()
    exact.loss(exact(tokens(2, 8)), tokens(2, 8)).backward()
    for (name, ours), theirs in zip(model.named_parameters(), exact.parameters(), strict=True):
        error = (ours.grad - theirs.grad).norm() / theirs.grad.norm()
        assert error < 0.1, name


def test_a_checkpoint_holds_parameters_only() -> None:
    model = build(tied_head=False)
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}
    assert not list(model.buffers())


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(6, None), (2, None), (2, 10)])
def test_flops_are_those_that_torch_counts(kv_heads: int, head_dim: int | None) -> None:
    model = build(kv_heads=kv_heads, head_dim=head_dim)
    parts = model.forward_flops((16,))
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(tokens(3, 16))
    masked = 16 * 15 // 2  # pairs of positions, which torch counts in both products of each of 3 blocks
    assert 3 * parts.total == counter.get_total_flops() - 3 * 3 * 4 * masked * 6 * (head_dim or 4)
    assert parts.stem == 0
    assert parts.head == 2 * 16 * 24 * 13
    assert len(parts.blocks) == 3


def shape(name: str) -> dict[str, Any]:
    values = yaml.safe_load((find_folder("conf") / "model" / f"{name}.yaml").read_text())
    return {key: value for key, value in values.items() if key not in ("defaults", "_target_")}


def closed_form(*, layers: int, dim: int, heads: int, kv_heads: int, ffn_dim: int, vocab_size: int,
                tied_head: bool = True, experts: int = 0, head_dim: int = 0, qk_norm: bool = False,
                shared_experts: int = 0, dense_layers: int = 0, dense_ffn_dim: int = 0,
                **_: Any) -> int:  # fmt: skip
    width = head_dim or dim // heads
    attention = 2 * dim * width * (heads + kv_heads) + 2 * width * qk_norm
    return (
        (1 if tied_head else 2) * vocab_size * dim
        + layers * (attention + 2 * dim)
        + (layers - dense_layers) * (3 * dim * ffn_dim * ((experts or 1) + shared_experts) + dim * experts)
        + dense_layers * 3 * dim * dense_ffn_dim
        + dim
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("124m", 123_551_232),  # by hand: 50257 x 768 + 12 x (4 x 768^2 + 3 x 768 x 2048 + 2 x 768) + 768
        ("1b", 1_235_814_400),
        ("8b", 8_030_261_248),
        ("70b", 70_553_706_496),
        # The published 15,706,484,224, whose attention has 13,763,072 weights in each of 27 layers, not ours.
        ("deepseek_v2_lite", 15_706_484_224 - 27 * (13_763_072 - 12_582_912)),
        ("mixtral_8x7b", 46_702_792_704),
        ("qwen3_30b_a3b", 30_532_122_624),
    ],
)
def test_sizes_are_the_published_ones(name: str, published: int) -> None:
    with torch.device("meta"):
        model = (MoeTransformer if "experts" in shape(name) else Transformer)(**shape(name))
    assert sum(parameter.numel() for parameter in model.parameters()) == published
    assert closed_form(**shape(name)) == published


LIBRARY_NAMES = {
    "stem.": "model.embed_tokens.", "head.norm.": "model.norm.", "head.output.": "lm_head.",
    "blocks.": "model.layers.", "attention_norm": "input_layernorm", ".attention.": ".self_attn.",
    "feed_forward_norm": "post_attention_layernorm", "query_norm": "q_norm", "key_norm": "k_norm",
    "query.": "q_proj.", "key.": "k_proj.", "value.": "v_proj.", ".output.": ".o_proj.",
    ".feed_forward.router.": ".mlp.gate.", ".feed_forward.experts.down": ".mlp.experts.down_proj",
}  # fmt: skip
MIXTURE: dict[str, Any] = {"experts": 5, "experts_per_token": 2, "balance": 0.0, "renormalise": True}


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
@torch.no_grad()
def test_mixtures_are_those_of_the_library(kind: str) -> None:
    """With the same weights. The library computes norms and routing in float32."""
    of_qwen = {"head_dim": 6, "qk_norm": True, "norm_eps": 1e-6} if kind == "qwen3_moe" else {}
    with torch.device("meta"):
        model = MoeTransformer(**{**SHAPE, **MIXTURE, **of_qwen}, tied_head=False, rope_theta=50.0)
    materialise(model, seed=1, device="cpu", dtype=torch.float64)
    for parameter in model.parameters():
        parameter.mul_(8.0 if parameter.dim() > 1 else 1.25)
    transformers = pytest.importorskip("transformers")
    settings = transformers.AutoConfig.for_model(
        kind, hidden_size=24, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
        vocab_size=13, intermediate_size=20, moe_intermediate_size=20, num_experts_per_tok=2,
        norm_topk_prob=True, rope_theta=50.0, rope_parameters={"rope_type": "default", "rope_theta": 50.0},
        num_experts=5, num_local_experts=5, rms_norm_eps=of_qwen.get("norm_eps", 1e-5),
        head_dim=of_qwen.get("head_dim", 4), sliding_window=None, tie_word_embeddings=False,
    )  # fmt: skip
    library = (
        transformers.AutoModelForCausalLM.from_config(settings, experts_implementation="eager")
        .double()
        .eval()
    )
    weights, fused = {}, {}
    for name, weight in model.named_parameters():
        path = name
        for ours, theirs in LIBRARY_NAMES.items():
            path = path.replace(ours, theirs) if not path.startswith(("lm_head", "model.norm")) else path
        block, _, leaf = name.rpartition(".feed_forward.experts.")
        if leaf in ("gate", "up"):
            fused.setdefault(block.replace("blocks.", "model.layers."), []).append(weight)
        else:
            weights[path] = weight
    weights |= {f"{block}.mlp.experts.gate_up_proj": torch.cat(both, 1) for block, both in fused.items()}
    library.load_state_dict(weights)
    rows = tokens(2, 9)
    expected = library(rows).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(model(rows), expected, rtol=2e-5, atol=2e-5)


def test_heads_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.head_dim = 5"):
        Transformer(**(SHAPE | {"head_dim": 5}))
    with pytest.raises(ValueError, match=r"model\.heads = 5"):
        Transformer(**(SHAPE | {"heads": 5}))
    with pytest.raises(ValueError, match=r"model\.kv_heads = 4"):
        Transformer(**(SHAPE | {"kv_heads": 4}))


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_rotary_tables_are_computed_once_for_all_blocks_and_recomputations(
    monkeypatch: pytest.MonkeyPatch, checkpointing: str
) -> None:
    lengths: list[int] = []

    def noting(positions: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        lengths.append(len(positions))
        return rotation(positions, **options)

    monkeypatch.setattr(transformer, "rotation", noting)
    model = apply_checkpointing(build(), keeps=checkpointing, compiled=False)
    for length in (5, 5, 7):
        model(tokens(2, length)).sum().backward()
    assert lengths == [5, 7]
