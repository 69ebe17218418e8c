"""Map-style datasets that tests train on, as users write them: they know nothing of this package."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset


class Sentences(Dataset[tuple[Tensor, Tensor]]):
    """Token ids that depend on the index, some of them replaced at random if `noise` is above 0."""

    def __init__(self, count: int, length: int = 32, noise: float = 0.0) -> None:
        self.count, self.length, self.noise = count, length, noise

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens = (torch.arange(self.length + 1) * (index % 7 + 1) + index) % 256
        replaced = torch.rand(self.length + 1) < self.noise
        return torch.where(replaced, random.randrange(256), tokens)[:-1], tokens[1:]


class SlowOnOneRank(Sentences):
    """Makes one rank wait for each of its samples, as a slow disk does."""

    def __init__(self, rank: int, pause_s: float) -> None:
        super().__init__(count=64, length=16)
        self.pause_s = pause_s if dist.get_rank() == rank else 0.0

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self.pause_s)
        return super().__getitem__(index)


class SlowStorage:
    """Token ids that depend on the index; each takes `pause_s` to read, as from a slow disk."""

    def __init__(self, count: int, pause_s: float, length: int = 64) -> None:
        self.count, self.pause_s, self.length = count, pause_s, length

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self.pause_s)
        tokens = (torch.arange(self.length + 1) * (index % 7 + 1) + index) % 256
        return tokens[:-1], tokens[1:]


class Points:
    """Arrays and plain numbers; the sample `bad` raises, `odd` has another shape."""

    def __init__(self, count: int, bad: int | None = None, odd: int | None = None) -> None:
        self.count, self.bad, self.odd = count, bad, odd

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[np.ndarray, float]:
        if index == self.bad:
            raise ValueError(f"a bad label: {index}")
        return np.full(4 if index == self.odd else 3, index, dtype=np.float64), index / 2


class Unseeded(Points):
    """Draws from a generator of its own, so a sample is never the same again."""

    def __getitem__(self, index: int) -> tuple[np.ndarray, float]:
        return np.random.default_rng().normal(size=3), 0.0


class Masked(Dataset[tuple[Tensor, Tensor]]):
    """Sequences of `length` numbers; a different part of each sample's targets is `ignored`.

    All targets of the samples in `blank` are ignored.
    """

    def __init__(
        self, samples: int = 64, length: int = 32, ignored: int = -100, blank: Sequence[int] = ()
    ) -> None:
        self.blank = blank
        self.tokens = torch.randint(256, (samples, length + 1), generator=torch.Generator().manual_seed(3))
        self.ignored = ignored

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.tokens[index, :-1], self.tokens[index, 1:].clone()
        targets[: len(targets) if index in self.blank else index * 7 % len(targets)] = self.ignored
        return inputs, targets


class Table(Dataset[tuple[Tensor, Tensor]]):
    """Rows of numbers with a class each."""

    def __init__(self, count: int = 200, columns: int = 7) -> None:
        self.count, self.columns = count, columns

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = torch.randn(self.columns, generator=torch.Generator().manual_seed(index))
        return row, (row.sum() > 0).long() + (row[0] > 1).long()


class Texts(Dataset[tuple[Tensor, Tensor]]):
    """Documents of 1 to `longest` random tokens, with their targets."""

    def __init__(self, count: int = 400, longest: int = 40) -> None:
        numbers = torch.Generator().manual_seed(5)
        sizes = torch.randint(1, longest + 1, (count,), generator=numbers).tolist()
        self.texts = [torch.randint(256, (size + 1,), generator=numbers) for size in sizes]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.texts[index][:-1], self.texts[index][1:]
