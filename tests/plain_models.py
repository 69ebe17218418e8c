"""Models as PyTorch users write them: plain modules that know nothing of this package."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpc_parallel.models.layered import LayeredModel
from tests.models import NeedsNumbers


class TableNet(nn.Module):
    """Rows [batch, columns] of a table -> classes, by layers with BatchNorm and dropout.

    Its constructor draws, reads a number of a tensor, fills a gate and keeps a plain tensor.
    """

    def __init__(self, columns: int = 7, width: int = 16, layers: int = 2, rate: float = 0.2) -> None:
        super().__init__()
        self.first = nn.Linear(columns, width)
        rates = [value.item() for value in torch.linspace(0, rate, layers)]
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, width, bias=False), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(value)
            )
            for value in rates
        )
        self.gate = nn.Parameter(torch.full((width,), 0.5))
        self.last = nn.Linear(width, 3)
        self.scale = torch.tensor(0.5)
        nn.init.orthogonal_(self.last.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x) + self.gate * x * self.scale
        return self.last(x)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="sum")

    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"accuracy": (output.argmax(-1) == target).sum()}


class NamesItsOutput(TableNet):
    """Returns a table of outputs, as models of transformers do."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": super().forward(x)}


class HalfNamesItsOutput(NamesItsOutput):
    def forward(self, x: Tensor) -> Any:
        return x, (x, super().forward(x))


def synced(rate: float = 0.2) -> nn.Module:
    """As it is prepared for DistributedDataParallel on GPUs."""
    return nn.SyncBatchNorm.convert_sync_batchnorm(TableNet(rate=rate))  # type: ignore[no-any-return]


class SharedNet(nn.Module):
    """Tokens [batch, seq] -> logits, with one embedding for both ends and one layer called twice.

    It has a lock, so it can't be copied.
    """

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.layer = nn.Linear(width, width)
        self.output = nn.Linear(width, 256, bias=False)
        self.output.weight = self.embedding.weight
        self.unused = nn.Linear(width, width)
        self.register_buffer("decay", torch.linspace(0.5, 1, width))
        self.lock = threading.Lock()
        self.decay: Tensor

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for _ in range(2):
            x = x + torch.tanh(self.layer(x)) * self.decay
        return self.output(x)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


class Large(SharedNet):
    """Notes the width of each model that is built."""

    small: ClassVar = {"width": 4}
    built: ClassVar[list[int]] = []

    def __init__(self, width: int = 8) -> None:
        super().__init__(width)
        self.built.append(width)


class Counting(SharedNet):
    """Counts its training passes in buffers that no checkpoint has: in place, or in a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("in_place", "replaced"):
            self.register_buffer(name, torch.zeros(()), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training:
            self.in_place += 1
            self.replaced = self.replaced + 1
        return super().forward(tokens)


class Remembering(SharedNet):
    """Keeps plain attributes: two that change in each step, and others that need no checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.cache, self.rate = 0, None, 0.5
        self.mean, self.constant = torch.zeros(()), torch.ones(())

    def forward(self, tokens: Tensor) -> Tensor:
        self.cache = self.constant + 1 if self.cache is None else self.cache
        out = super().forward(tokens) * (1 + self.rate * self.mean)
        self.width, self.hidden = out.shape[-1], out
        if self.training:
            self.count += 1
            self.mean = 0.9 * self.mean + 0.1 * out.detach().mean().to(self.mean)
        return out


class Lossless(nn.Linear):
    """Has no loss."""


def own_synced() -> nn.Module:
    class Own(nn.SyncBatchNorm):
        loss = TableNet.loss

    return Own(7)


def hooked() -> nn.Module:
    """Its constructor halves a gradient."""
    model = TableNet()
    model.first.weight.register_hook(lambda gradient: gradient * 0.5)
    return model


def complex_weight() -> nn.Module:
    model = TableNet()
    model.gate = nn.Parameter(torch.ones(16, dtype=torch.complex64))
    return model


def hooked_parts() -> nn.Module:
    model = LayeredModel(stem=nn.Identity(), blocks=[], head=nn.Linear(7, 3))
    model.head.bias.register_post_accumulate_grad_hook(lambda weight: None)
    return model


def normed() -> nn.Module:
    """Its constructor computes a weight from two others."""
    model = TableNet()
    model.last = nn.utils.weight_norm(model.last)
    return model


def not_a_module(**_: Any) -> int:
    return 3


def made(**arguments: Any) -> nn.Module:
    """A function that makes a plain module."""
    return SharedNet(**arguments)


def made_table(**arguments: Any) -> nn.Module:
    """A function that makes a plain module, whose constructor reads numbers."""
    return TableNet(**arguments)


def made_layers(**arguments: Any) -> nn.Module:
    """A function that makes a model of parts, whose constructor reads numbers."""
    return NeedsNumbers(**arguments)
