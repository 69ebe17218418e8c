"""Samples of a language model: windows of a sequence of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Windows:
    """Sample i has tokens i L to (i+1) L of `tokens` [count]: L inputs, and L targets one token later.

    Windows overlap by one token, so each token except the first is a target exactly once.

    Raises ValueError if the tokens don't fill one window.
    """

    tokens: NDArray[Any]
    sequence_length: int
    vocab_size: int
    name: str  # "training" or "validation", for messages

    def __post_init__(self) -> None:
        if len(self) < 1:
            raise ValueError(
                f"data.sequence_length = {self.sequence_length} needs {self.sequence_length + 1} tokens, but "
                f"the {self.name} part has {len(self.tokens)}. Try more text, a smaller "
                f"data.sequence_length or another data.validation_share."
            )

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.sequence_length

    def batch(self, positions: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Returns inputs and targets, int64 [batch, seq].

        Raises ValueError for a token outside of the vocabulary; an embedding on a GPU would crash instead.
        """
        starts = np.asarray(positions, dtype=np.int64)[:, None] * self.sequence_length
        tokens = self.tokens[starts + np.arange(self.sequence_length + 1)].astype(np.int64)
        if tokens.size and tokens.min() < 0:
            raise ValueError(f"token {tokens.min()} in the {self.name} part: token ids start at 0")
        if tokens.size and tokens.max() >= self.vocab_size:
            raise ValueError(
                f"token {tokens.max()} in the {self.name} part is beyond vocab_size = {self.vocab_size}: "
                f"the tokens do not match their description. Make both again with "
                f"`python -m hpc_parallel tokenize`."
            )
        windows = torch.from_numpy(tokens)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
