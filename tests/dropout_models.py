"""Models with dropout where a layout splits what it drops: columns of a layer, and maps of an image."""

from __future__ import annotations

from types import MappingProxyType

from torch import Tensor, nn
from torch.nn import functional as F

from hpc_parallel.models.layered import LayeredModel


class Feed(nn.Module):
    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.hidden, self.out = nn.Dropout(rate), nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.down(self.hidden(F.gelu(self.up(x)))))


class Block(nn.Module):
    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        self.norm, self.feed = nn.RMSNorm(width), Feed(width, rate)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.feed(self.norm(x))


class Tokens(LayeredModel):
    """Predicts the next token from the last one."""

    tensor_roles = MappingProxyType({
        "stem.0": "vocabulary", "blocks.*.norm": "position", "blocks.*.feed": "whole",
        "blocks.*.feed.up": "column", "blocks.*.feed.down": "row", "head": "logits",
    })  # fmt: skip

    def __init__(self, *, layers: int, width: int, rate: float) -> None:
        stem = nn.Sequential(nn.Embedding(256, width), nn.Dropout(rate))
        super().__init__(
            stem=stem, blocks=(Block(width, rate) for _ in range(layers)), head=nn.Linear(width, 256)
        )

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


class Images(LayeredModel):
    """Digits by two convolutions with dropout of channels and of pixels."""

    def __init__(self, *, width: int, rate: float) -> None:
        blocks = (
            nn.Sequential(nn.Conv2d(before, width, 3, padding=1), nn.ReLU(), kind(rate))
            for before, kind in ((width, nn.Dropout2d), (width, nn.Dropout))
        )
        super().__init__(stem=First(width), blocks=blocks, head=Last(width))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="sum")


class First(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.to(self.conv.weight.dtype) / 255)


class Last(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.drop, self.output = nn.Dropout(0.2), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.drop(x.mean((2, 3))))
