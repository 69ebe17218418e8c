"""The loss in chunks against torch's cross-entropy of whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hpc_parallel.models.transformer import Head, Transformer
from hpc_parallel.strategies import chunked_loss
from hpc_parallel.strategies.chunked_loss import (
    ChunkedCrossEntropy,
    cross_entropy,
    errors_of,
    log_probabilities,
)
from tests.composed import prepared

TOKENS, DIM, VOCABULARY = 30, 12, 17


def drawn(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, DIM, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(VOCABULARY, DIM, generator=generator, dtype=torch.float64).to(dtype)
    target = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    target[4] = -100  # as torch's cross-entropy, without a loss
    return hidden.requires_grad_(), weight.requires_grad_(), target


def plain(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    loss = F.cross_entropy((hidden @ weight.T).to(torch.float64), target, reduction="sum")
    return loss.detach(), *torch.autograd.grad(0.3 * loss, (hidden, weight))


@pytest.mark.parametrize("chunk_tokens", [1, 7, 30])
def test_loss_and_gradients_equal_those_of_whole_logits(
    monkeypatch: pytest.MonkeyPatch, chunk_tokens: int
) -> None:
    monkeypatch.setitem(chunked_loss.LOSS_CHUNK_BYTES, "cpu", chunk_tokens * VOCABULARY * 4)
    hidden, weight, target = drawn()
    loss = ChunkedCrossEntropy.apply(hidden, weight, target, torch.float64, None)
    gradients = torch.autograd.grad(0.3 * loss, (hidden, weight))
    for value, exact in zip((loss, *gradients), plain(hidden, weight, target), strict=True):
        torch.testing.assert_close(value, exact, rtol=1e-12, atol=1e-12)


def test_no_logits_of_more_tokens_than_a_chunk_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(chunked_loss.LOSS_CHUNK_BYTES, "cpu", 10 * VOCABULARY * 4)
    tokens: list[int] = []

    def noting(logits: Tensor, rows: Any, *, dtype: torch.dtype) -> Tensor:
        tokens.append(len(logits))
        return log_probabilities(logits, rows, dtype=dtype)

    monkeypatch.setattr(chunked_loss, "log_probabilities", noting)
    cross_entropy(*drawn(), torch.float64, None, needs=(True, True))
    assert tokens == [10, 10, 10]


def test_a_validation_computes_no_gradient_of_a_chunk() -> None:
    hidden, weight, target = drawn()

    def refuse(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        raise AssertionError("no errors are needed")

    with torch.no_grad():
        loss, *gradients = cross_entropy(
            hidden, weight, target, torch.float64, None, refuse, needs=(False, False)
        )
    torch.testing.assert_close(loss, plain(hidden, weight, target)[0], rtol=1e-12, atol=1e-12)
    assert gradients == [None, None]


def test_between_the_passes_only_the_gradients_are_kept() -> None:
    hidden, weight, target = drawn()
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        ChunkedCrossEntropy.apply(hidden, weight, target, torch.float64, None)
    assert sorted(kept) == sorted([hidden.numel(), weight.numel()])


def test_products_in_bfloat16_equal_those_of_the_plain_loss() -> None:
    """Of operands that are exact in bfloat16; the errors are rounded to it by both, before two products."""
    hidden, weight, target = drawn(torch.bfloat16)
    loss = ChunkedCrossEntropy.apply(hidden, weight, target, torch.bfloat16, None)
    gradients = torch.autograd.grad(0.3 * loss, (hidden, weight))
    assert loss.dtype == torch.float32
    for value, exact in zip((loss, *gradients), plain(hidden, weight, target), strict=True):
        assert float((value.detach() - exact).norm() / exact.norm()) < 2**-7  # a bfloat16 has 8 bits


@pytest.mark.parametrize("which", [0, 1])
def test_one_gradient_at_a_time_is_the_same(which: int) -> None:
    """A pipeline that splits the backward pass asks for the gradient of the input first."""
    hidden, weight, target = drawn()
    loss = 0.3 * ChunkedCrossEntropy.apply(hidden, weight, target, torch.float64, None)
    (gradient,) = torch.autograd.grad(loss, (hidden, weight)[which], retain_graph=True)
    torch.testing.assert_close(gradient, plain(hidden, weight, target)[1 + which], rtol=1e-12, atol=1e-12)


@pytest.mark.full  # the compiler takes seconds to import
def test_the_compiled_softmax_of_a_chunk_is_the_same() -> None:
    """As torch.compile traces it, without its own kernels."""
    hidden, weight, target = drawn()
    traced = torch.compile(errors_of, dynamic=False, fullgraph=True, backend="aot_eager")
    loss = ChunkedCrossEntropy.apply(hidden, weight, target, torch.float64, None, traced)
    gradients = torch.autograd.grad(0.3 * loss, (hidden, weight))
    for value, exact in zip((loss, *gradients), plain(hidden, weight, target), strict=True):
        torch.testing.assert_close(value, exact, rtol=1e-12, atol=1e-12)


def test_a_compiled_loss_is_the_same() -> None:
    hidden, weight, target = drawn()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(hidden: Tensor, weight: Tensor) -> Tensor:
        return ChunkedCrossEntropy.apply(hidden, weight, target, torch.float64, None)  # type: ignore[no-any-return]

    loss = compiled(hidden, weight)
    gradients = torch.autograd.grad(0.3 * loss, (hidden, weight))
    for value, exact in zip((loss, *gradients), plain(hidden, weight, target), strict=True):
        torch.testing.assert_close(value, exact, rtol=1e-12, atol=1e-12)


class Smoothed(Transformer):
    """A loss of the user's own."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return super().loss(output, target) + output.square().sum()


class CappedHead(Head):
    """Changes the logits after the projection."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


def test_a_loss_or_head_of_the_users_own_gets_logits() -> None:
    mesh = type("OneDevice", (), {"mesh_dim_names": ("replicate",), "size": lambda self: 1})()
    config = prepared("model=tiny", "launcher=local", "device=cpu").config
    shape: dict[str, Any] = {
        "layers": 1, "dim": 8, "heads": 2, "kv_heads": 1, "ffn_dim": 8, "vocab_size": 5
    }  # fmt: skip
    capped, hooked = Transformer(**shape), Transformer(**shape)
    capped.head = CappedHead(8, vocab_size=5, norm_eps=1e-5)
    hooked.head.register_forward_hook(lambda *_: None)
    models = Transformer(**shape), Smoothed(**shape), capped, hooked
    assert [chunked_loss.applies(m, config=config, mesh=mesh) for m in models] == [True, False, False, False]
