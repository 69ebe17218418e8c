"""A model, data and a callback of one's own: the place of a weight on a damped spring, learnt from rows."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.training.callbacks import Callback


class Springs(Dataset[tuple[Tensor, Tensor]]):
    """Rows of stiffness, damping and time; the target is the place, by the closed form of the oscillator."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        stiffness, damping, time = torch.rand(3, generator=torch.Generator().manual_seed(index)).tolist()
        frequency = math.sqrt(1 + stiffness - (damping / 2) ** 2)
        place = math.exp(-damping / 2 * 4 * time) * math.cos(frequency * 4 * time)
        return torch.tensor([stiffness, damping, time]), torch.tensor([place])


class Regressor(LayeredModel):
    """Stem, blocks and head: the parts at which pipelines and `fsdp` may cut."""

    def __init__(self, *, width: int, depth: int) -> None:
        blocks = [Block(width) for _ in range(depth)]
        super().__init__(stem=nn.Linear(3, width), blocks=blocks, head=nn.Linear(width, 1))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The sum over all samples; the trainer divides it by the number of targets of the whole batch."""
        return (output - target).square().sum()


class Block(nn.Module):
    """A residual block of two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.feed(self.norm(x))


class Best(Callback):
    """Writes the step with the smallest loss into the run folder, and ends a training that is good enough."""

    def __init__(self, *, enough: float = 0.0) -> None:
        self.enough, self.best = enough, (math.inf, 0)

    def on_start(self, folder: Path, lines: list[Mapping[str, Any]]) -> None:
        self.folder = folder
        for line in lines:  # of earlier starts of a resumed run
            self.on_line(line)

    def on_line(self, line: Mapping[str, Any]) -> None:
        self.best = min(self.best, (line["loss"], line["step"]))

    def on_end(self, step: int) -> None:
        (self.folder / "best_step.json").write_text(json.dumps({"loss": self.best[0], "step": self.best[1]}))

    def stop_reason(self) -> str | None:
        return f"the loss is below {self.enough}" if self.best[0] < self.enough else None
