"""The base of all causal language models: the loss of a token and the FLOPs of attention."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from hpc_parallel.models.layered import LayeredModel, PartFlops


class LanguageModel(LayeredModel):
    """Tokens [batch, seq] -> logits [batch, seq, vocab]; between blocks [batch, seq, dim]."""

    attention_width: int
    """Width of all query heads together."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy in nats, summed over the tokens [batch, seq], in float32 (float64 stays)."""
        logits = output if output.dtype == torch.float64 else output.float()
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")

    def forward_flops(self, sample_shape: tuple[int, ...]) -> PartFlops:
        """2 FLOPs for each weight and token, and 4 seq^2 width for the two attention products of a block.

        The masked half counts, as is usual for utilisation (PaLM, Chowdhery et al. 2022, app. B).
        """
        (seq,) = sample_shape
        weights = super().forward_flops(sample_shape)
        blocks = tuple(flops + 4 * seq * seq * self.attention_width for flops in weights.blocks)
        return PartFlops(stem=weights.stem, blocks=blocks, head=weights.head)
