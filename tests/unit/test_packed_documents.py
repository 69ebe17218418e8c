"""A model on packed documents against the same documents one by one, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hpc_parallel.config.huggingface_source import FAMILIES
from hpc_parallel.data.dataset import DatasetData
from hpc_parallel.models.attention import CausalAttention, FullAttention, Positions
from hpc_parallel.models.huggingface import HuggingFaceModel, OwnPositions
from hpc_parallel.models.language import LanguageModel
from hpc_parallel.models.layered import LayeredModel, materialise
from hpc_parallel.models.transformer import Transformer
from hpc_parallel.strategies import packed_documents, precision
from hpc_parallel.strategies.context import ring
from tests.datasets import Texts
from tests.one_by_one import loss_of_documents

DATA = DatasetData(dataset=Texts(60), sequence_length=32, vocab_size=256, packing=True)


class Learnt(LanguageModel):
    """A decoder with a table of positions, as GPT-2."""

    ignore_index = -100

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        head = nn.Linear(16, 256)
        super().__init__(stem=Stem(), blocks=[block() for _ in range(2)], head=head)


class Stem(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, 16), nn.Embedding(40, 16)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.tokens(x) + self.places(positions)  # type: ignore[no-any-return]


class Blind(nn.Module):
    """A block that does not take documents."""

    def __init__(self, mix: nn.Module | None = None) -> None:
        super().__init__()
        self.projection, self.mix = nn.Linear(16, 48), mix or CausalAttention()

    def forward(self, x: Tensor, **documents: Tensor) -> Tensor:
        parts = self.projection(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return x + self.mix(*parts, **documents).transpose(1, 2).flatten(2)  # type: ignore[no-any-return]


class Seeing(Blind):
    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(x, **({} if documents is None else {"documents": documents}))


def learnt(block: Callable[[], nn.Module] = Seeing) -> LayeredModel:
    with torch.device("meta"):
        return Learnt(block)


def decoder() -> LayeredModel:
    with torch.device("meta"):
        return Transformer(layers=2, dim=32, heads=4, kv_heads=2, ffn_dim=48, vocab_size=256)


def difference(model: LayeredModel) -> float:
    """The largest relative difference of the loss and the gradients from documents one by one."""
    materialise(model, seed=1, device="cpu", dtype=torch.float64)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8)  # scores of order 1, so that attention matters
    model.packed_samples = True
    inputs, targets = DATA.train.batch(np.arange(len(DATA.train) - 8, len(DATA.train)))
    results = []
    for loss in (model.loss(model(inputs), targets), loss_of_documents(model, inputs, targets)):
        loss.backward()
        results.append([loss.detach(), *(weight.grad for weight in model.parameters())])
        model.zero_grad(set_to_none=True)
    return max(float((a - b).norm() / b.norm()) for a, b in zip(*results, strict=True))


def library(kind: str) -> LayeredModel:
    sizes = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
        "vocab_size": 256, "max_position_embeddings": 64,
    }  # fmt: skip
    with torch.device("meta"):
        model = HuggingFaceModel(config={"model_type": kind, **sizes})
    model.ignore_index = -100
    return model


def exact_rotation(self: OwnPositions, x: Tensor) -> tuple[Tensor, Tensor]:
    """In float64: the library's angles are float32, so equal distances are not exactly equal."""
    places = self.mix.positions(x.shape[1], device=x.device).double()
    angles = torch.outer(places, self.rotary.inv_freq.double()).repeat(1, 2)[None]
    return angles.cos(), angles.sin()


@pytest.mark.parametrize(
    ("build", "bound"),
    [(decoder, 1e-12), (learnt, 1e-12), *((partial(library, kind), 1e-11) for kind in FAMILIES)],
)
def test_loss_and_gradients_are_those_of_documents_one_by_one(
    build: Callable[[], LayeredModel], bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OwnPositions, "_rotation", exact_rotation)
    assert difference(build()) < bound

    def leaking(self: Positions, starts: Tensor, *, dtype: torch.dtype) -> Tensor:
        """One query sees the last token of the document before its own."""
        starts = starts.clone()
        row, place = torch.nonzero(starts)[0].tolist()
        starts[row, place] -= 1
        return whole(self, starts, dtype=dtype)

    whole = Positions.documents
    monkeypatch.setattr(Positions, "documents", leaking)
    assert difference(build()) > 1e-6


def both_ways() -> nn.Module:
    return Seeing(FullAttention())


class Own(Learnt):
    ignore_index = None

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return super().loss(output, target)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: learnt(Blind), "Blind, a block of Learnt, does not end with a parameter `documents`"),
        (lambda: learnt(both_ways), "only causal attention keeps documents apart"),
        (lambda: Own(Seeing), "has a loss of its own and not ignore_index = -100"),
        (lambda: learnt(lambda: Seeing(nn.Identity())), "has no CausalAttention"),
    ],
)
def test_a_model_that_would_mix_documents_is_refused(build: Callable[[], Any], words: str) -> None:
    (problem,) = packed_documents.find_problems(build())
    assert words in str(problem)
    assert list(packed_documents.find_problems(learnt())) == []


def test_the_begins_that_devices_gather_are_contiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are every second number of a packed sample, and NCCL refuses to send such a tensor."""
    _, starts = torch.arange(16).view(1, 8, 2).unbind(-1)

    def all_gather(output: Tensor, part: Tensor, *, group: Any) -> None:
        assert part.is_contiguous()
        output.copy_(part.repeat(2, *[1] * (part.dim() - 1)).view_as(output))

    monkeypatch.setattr(ring, "all_gather", all_gather)
    gathered = ring.gather_kv(starts[..., None], SimpleNamespace(size=lambda: 2))  # type: ignore[arg-type]
    assert gathered.flatten().tolist() == [1, 3, 5, 7, 1, 3, 5, 7, 9, 11, 13, 15, 9, 11, 13, 15]


def test_a_later_stage_in_half_precision_takes_the_starts_of_documents() -> None:
    model = decoder()
    materialise(model, seed=1, device="cpu", dtype=torch.float32)
    model.packed_samples, model.stem = True, None
    x, starts = torch.randn(1, 8, 32), torch.tensor([[0, 0, 0, 3, 3, 3, 3, 3]])
    exact = model(x, document_starts=starts)
    precision.apply(model, precision="bfloat16", device_type="cpu")
    torch.testing.assert_close(model(x, document_starts=starts).float(), exact, rtol=0.05, atol=0.05)
