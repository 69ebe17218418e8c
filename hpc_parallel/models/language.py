"""The base of all language models: the head, the loss of a token and the FLOPs of attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpc_parallel.models.attention import FullAttention
from hpc_parallel.models.layered import LayeredModel, PartFlops


class LanguageHead(nn.Module):
    """The last norm and the projection to logits. `projection` holds the name of the submodule."""

    projection: str
    norm: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        return self.get_submodule(self.projection)(self.norm(x))  # type: ignore[no-any-return]


class LanguageModel(LayeredModel):
    """Tokens [batch, seq] -> logits [batch, seq, vocab]; between blocks [batch, seq, dim].

    If the head is a `LanguageHead` and `loss` is not overridden, training computes logits and loss in chunks
    of tokens (strategies/chunked_loss.py).
    """

    attention_width: int
    """Width of all query heads together."""
    label_count: int
    """The number of logits of a position."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy in nats, summed over the tokens [batch, seq], in float32 (float64 stays)."""
        logits = output if output.dtype == torch.float64 else output.float()
        return F.cross_entropy(logits.flatten(0, 1), target.flatten().long(), reduction="sum")

    def forward_flops(self, sample_shape: tuple[int, ...]) -> PartFlops:
        """2 FLOPs for each weight and token, and 4 x width for each pair of positions in attention.

        The products behind the causal mask do not count, because fused kernels skip them. PaLM counts them
        (Chowdhery et al. 2022, app. B) and so reports a higher utilisation for the same time. In a block with
        FullAttention, all products count.
        """
        (seq,) = sample_shape
        weights = super().forward_flops(sample_shape)
        blocks = tuple(
            flops + 4 * _attended_pairs(block, seq) * self.attention_width
            for flops, block in zip(weights.blocks, self.blocks.values(), strict=True)
        )
        return PartFlops(stem=weights.stem, blocks=blocks, head=weights.head)


def _attended_pairs(block: nn.Module, seq: int) -> int:
    """The number of pairs (position, attended position) of a sample in the attention of `block`."""
    full = any(isinstance(module, FullAttention) for module in block.modules())
    return seq * seq if full else seq * (seq + 1) // 2
