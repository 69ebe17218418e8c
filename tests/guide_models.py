"""Models and data of docs/own-model.md: its code as it stands there, in models that can train."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from hpc_parallel.models.attention import CausalAttention
from hpc_parallel.models.layered import Column, LayeredModel

GUIDE = Path(__file__).resolve().parents[1] / "docs/own-model.md"
NAMES: dict[str, Any] = {"__name__": __name__}
for _code in re.findall(r"```python\n(import torch\n.*?class Gate.*?)```", GUIDE.read_text(), re.DOTALL):
    exec(_code, NAMES)
for _code in re.findall(r"<!-- example: \w+ -->\n```python\n(.*?)```", GUIDE.read_text(), re.DOTALL):
    exec(_code, NAMES)
WIDTH = 16


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    """Samples [seq, 2] of words and segments, and the next words."""

    def __init__(self, count: int = 200, length: int = 32) -> None:
        self.count, self.length = count, length

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        words = torch.randint(256, (self.length + 1,), generator=torch.Generator().manual_seed(index))
        return torch.stack((words[:-1], words[:-1] % 4), dim=-1), words[1:]


class Numbers(Dataset[tuple[Tensor, Tensor]]):
    """Images of uint8, and four numbers each."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = torch.randint(256, (4, 4, 4), generator=torch.Generator().manual_seed(index)).to(torch.uint8)
        return image, image.float().mean((1, 2)) / 255


class GuideBlock(nn.Module):
    """The guide's attention and its gate. What the keys are: every token whose segment is not 0."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(WIDTH), NAMES["Gate"](WIDTH)
        self.attention = NAMES["BiasedAttention"](WIDTH, heads=4)

    def forward(self, x: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.gate(self.attention(self.norm(x), kept)), kept


class GuideStem(NAMES["TwoInputs"]):  # type: ignore[misc]
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = super().forward(x)
        return hidden, (x[..., 1] != 0).to(hidden.dtype)


class GuideHead(nn.Linear):
    def forward(self, x: Tensor, kept: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


class Text(LayeredModel):
    """Two inputs, a learned bias, padding and a gate that starts at zero."""

    def __init__(self, **shape: object) -> None:
        blocks = [GuideBlock() for _ in range(4)]
        super().__init__(stem=GuideStem(WIDTH), blocks=blocks, head=GuideHead(WIDTH, 256))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


class BiasedHeads(nn.Module):
    """Attention with learned distances of `biases` heads, 4 or 1, and the slopes of ALiBi."""

    def __init__(self, biases: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.distances, self.mix = nn.Embedding(32, biases), CausalAttention()

    def bias(self, queries: Tensor, keys: Tensor) -> Tensor:
        distance = (queries[:, None] - keys).clamp(0, 31)
        learned: Tensor = self.distances(distance).permute(2, 0, 1)
        slopes = 2.0 ** -torch.arange(1, len(learned) + 1, dtype=learned.dtype)
        return learned - slopes[:, None, None] * distance

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (-1, WIDTH // 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = self.mix(query, key, value, bias=self.bias)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class BiasedBlock(nn.Module):
    def __init__(self, biases: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), BiasedHeads(biases)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x))  # type: ignore[no-any-return]


class Biased(LayeredModel):
    """A bias of attention with roles for strategy.tensor; each block has 4 heads."""

    def __init__(self, biases: int, **shape: object) -> None:
        self.tensor_roles = {
            "stem": "vocabulary", "blocks.*.norm": "position", "blocks.*.attention": "whole",
            "blocks.*.attention.qkv": Column(parts=3), "blocks.*.attention.out": "row",
            "blocks.*.attention.distances": "alike", "head": "logits",
        }  # fmt: skip
        blocks = [BiasedBlock(biases) for _ in range(4)]
        super().__init__(stem=nn.Embedding(256, WIDTH), blocks=blocks, head=nn.Linear(WIDTH, 256))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


class Pixels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.to(self.conv.weight.dtype) / 255).mean((2, 3))  # type: ignore[no-any-return]


class Brightness(NAMES["Regression"]):  # type: ignore[misc]
    """Images -> four numbers."""

    def __init__(self, **shape: object) -> None:
        self.tensor_roles = {"stem": "alike", "blocks.*": "alike", "head": "classes"}
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
        super().__init__(stem=Pixels(), blocks=blocks, head=nn.Linear(WIDTH, 4))


class Recurrence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        state, states = torch.zeros_like(x[:, 0]), []
        for place in range(x.shape[1]):
            state = self.decay.sigmoid() * state + x[:, place]
            states.append(state)
        return torch.stack(states, dim=1)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), Recurrence()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm(x))
        return x + self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


class Recurrent(LayeredModel):
    """A recurrence of the role `alike` beside layers that are split."""

    def __init__(self, **shape: object) -> None:
        self.tensor_roles = {
            "stem": "vocabulary", "blocks.*.norm": "position", "blocks.*.mix": "alike",
            "blocks.*.up": "column", "blocks.*.down": "row", "head": "logits",
        }  # fmt: skip
        super().__init__(
            stem=nn.Embedding(256, WIDTH), blocks=[Mixed() for _ in range(4)], head=nn.Linear(WIDTH, 256)
        )

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")
