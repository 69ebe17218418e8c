"""Samples of a language model: windows over a row of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Windows:
    """Sample i is tokens [i L, (i+1) L] of `tokens` [count]: L inputs, and the same shifted by one.

    Neighbours overlap by one token, so that each but the first is a target once.

    Raises ValueError where the tokens don't fill one window.
    """

    tokens: NDArray[Any]
    sequence_length: int
    vocab_size: int
    name: str  # of the part, for messages

    def __post_init__(self) -> None:
        if len(self) < 1:
            raise ValueError(
                f"data.sequence_length = {self.sequence_length} needs {self.sequence_length + 1} tokens, but "
                f"the {self.name} part has {len(self.tokens)}: give more text, a smaller "
                f"data.sequence_length, or another data.validation_share."
            )

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.sequence_length

    def batch(self, positions: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 [batch, seq].

        Raises ValueError for a token beyond the vocabulary (a lookup on a GPU would only crash).
        """
        starts = np.asarray(positions, dtype=np.int64)[:, None] * self.sequence_length
        tokens = self.tokens[starts + np.arange(self.sequence_length + 1)].astype(np.int64)
        if tokens.size and tokens.max() >= self.vocab_size:
            raise ValueError(
                f"token {tokens.max()} in the {self.name} part is beyond vocab_size = {self.vocab_size}: "
                f"the tokens and their description don't belong together. Make both anew with "
                f"`python -m hpc_parallel tokenize`."
            )
        windows = torch.from_numpy(tokens)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
