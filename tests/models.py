"""Models that tests train or run besides the reference ones."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.models.transformer import Transformer


class Decided(Transformer):
    """A decoder with weights so large that each token depends on all before it, without any training."""

    def initialise(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        if tensor.dim() < 2:
            tensor.fill_(1.0)
        else:
            tensor.normal_(std=0.2, generator=generator)


class Bigram(LayeredModel):
    """Guesses a token from the last one alone."""

    def __init__(self, **shape: object) -> None:
        blocks = [nn.Linear(16, 16)]
        super().__init__(stem=nn.Embedding(256, 16), blocks=blocks, head=nn.Linear(16, 256))


class Slow(Transformer):
    """A decoder whose head takes its time."""

    def __init__(self, *, pause_s: float, **shape: Any) -> None:
        super().__init__(**shape)
        assert self.head is not None
        self.head.register_forward_hook(lambda *_: time.sleep(pause_s))
