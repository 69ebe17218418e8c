"""The reference decoder: pre-norm blocks of grouped-query attention and SwiGLU, as in Llama.

Touvron et al. 2023 (Llama), Zhang & Sennrich 2019 (RMSNorm), Su et al. 2021 (rotary positions),
Ainslie et al. 2023 (grouped-query attention), Shazeer 2020 (SwiGLU). No biases, no dropout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpc_parallel.models.attention import CausalAttention, PositionTables
from hpc_parallel.models.drawn_weights import by_rows
from hpc_parallel.models.language import LanguageHead, LanguageModel
from hpc_parallel.models.layered import Column

RotaryTables = PositionTables[tuple[Tensor, Tensor]]
"""cos and sin, as `rotation` returns them."""


class Transformer(LanguageModel):
    """Tokens [batch, seq] -> logits [batch, seq, vocab]; between blocks [batch, seq, dim].

    head_dim: the width of a head; None: `dim / heads`. qk_norm: queries and keys are normed in each head
    before they are rotated, as in Qwen3.

    Raises ValueError if the width of a head is not a whole, even number, or `kv_heads` don't divide `heads`.
    """

    tensor_roles: Mapping[str, str | Column] = MappingProxyType(
        {
            "stem": "vocabulary",
            "blocks.*.attention_norm": "position",
            "blocks.*.attention": "whole",
            "blocks.*.attention.query": "column",
            "blocks.*.attention.key": "column",
            "blocks.*.attention.value": "column",
            "blocks.*.attention.query_norm": "heads",
            "blocks.*.attention.key_norm": "heads",
            "blocks.*.attention.output": "row",
            "blocks.*.feed_forward_norm": "position",
            "blocks.*.feed_forward": "whole",
            "blocks.*.feed_forward.gate": "column",
            "blocks.*.feed_forward.up": "column",
            "blocks.*.feed_forward.down": "row",
            "head.norm": "position",
            "head.output": "logits",
        }
    )
    into_stream: tuple[str, ...] = (".attention.output.weight", ".feed_forward.down.weight")

    def __init__(
        self,
        *,
        layers: int,
        dim: int,
        heads: int,
        kv_heads: int,
        ffn_dim: int,
        vocab_size: int,
        tied_head: bool = True,
        rope_theta: float = 10000.0,
        norm_eps: float = 1e-5,
        head_dim: int | None = None,
        qk_norm: bool = False,
    ) -> None:
        if head_dim is not None and head_dim % 2:
            raise ValueError(f"model.head_dim = {head_dim} must be even")
        if (head_dim is None and (dim % heads or (dim // heads) % 2)) or heads % kv_heads:
            raise ValueError(
                f"model.heads = {heads} must split model.dim = {dim} into heads of an even width, "
                f"and model.kv_heads = {kv_heads} must divide it"
            )
        embedding = nn.Embedding(vocab_size, dim)
        tables: RotaryTables = PositionTables()
        head = Head(dim, vocab_size=vocab_size, norm_eps=norm_eps)
        super().__init__(
            stem=embedding,
            blocks=(
                Block(
                    attention=Attention(
                        dim,
                        heads=heads,
                        kv_heads=kv_heads,
                        rope_theta=rope_theta,
                        tables=tables,
                        head_dim=head_dim,
                        norm_eps=norm_eps if qk_norm else None,
                    ),
                    feed_forward=FeedForward(dim, hidden=ffn_dim),
                    norms=(nn.RMSNorm(dim, eps=norm_eps), nn.RMSNorm(dim, eps=norm_eps)),
                )
                for _ in range(layers)
            ),
            head=head,
        )
        self.layers = layers
        self.label_count = vocab_size
        self.attention_width = heads * (head_dim or dim // heads)
        if tied_head:  # Press & Wolf 2017
            head.output.weight = embedding.weight
            self.tied = {"head.output.weight": "stem.weight"}

    @by_rows
    def initialise(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Normal with std 0.02, scaled by 1/sqrt(2 layers) for projections into the residual stream (GPT-2).

        The stream sums 2 outputs of each layer, and the scale keeps the variance of the sum constant.
        """
        if name.endswith(self.into_stream):
            tensor.normal_(std=0.02 / math.sqrt(2 * self.layers), generator=generator)
        else:
            super().initialise(name, tensor, generator)


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)); [batch, seq, dim].

    With bfloat16, the embedding and the matrix products return bfloat16, so the residual stream is bfloat16.
    """

    def __init__(
        self, *, attention: Attention, feed_forward: FeedForward, norms: tuple[nn.RMSNorm, nn.RMSNorm]
    ) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = norms
        self.attention = attention
        self.feed_forward = feed_forward

    def prepare_compiled(self, x: Tensor, documents: Tensor | None = None) -> None:
        """Called with the forward pass's inputs before compiled code runs (`LayeredModel`)."""
        self.attention.prepare_compiled(x)

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), documents=documents)
        return x + self.feed_forward(self.feed_forward_norm(x))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Causal attention with rotary positions; `heads / kv_heads` query heads share a key-value head.

    Scores depend on the distance of two rotary positions, so positions in a packed sample do for documents.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        kv_heads: int,
        rope_theta: float,
        tables: RotaryTables | None = None,
        head_dim: int | None = None,
        norm_eps: float | None = None,
    ) -> None:
        """`tables`: shared by the blocks of a model. `norm_eps`: None: queries and keys are not normed."""
        super().__init__()
        self._tables: RotaryTables = PositionTables() if tables is None else tables
        self.head_dim = head_dim or dim // heads
        self.rope_theta = rope_theta
        self.query = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.key = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.mix = CausalAttention()
        self.output = nn.Linear(heads * self.head_dim, dim, bias=False)
        self.query_norm, self.key_norm = (
            None if norm_eps is None else nn.RMSNorm(self.head_dim, eps=norm_eps) for _ in range(2)
        )

    def forward(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        # The number of heads comes from the projections' outputs: a device may have only some of the heads.
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_dim))  # [batch, seq, head, head_dim]
            for projection in (self.query, self.key, self.value)
        )
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        cos_sin = self._rotation(x)
        mixed = self.mix(rotate(query, cos_sin), rotate(key, cos_sin), value, documents=documents)
        return self.output(mixed.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]

    def prepare_compiled(self, x: Tensor) -> None:
        """Compute the rotary tables for inputs like `x`, which compiled code then only reads."""
        self._rotation(x)

    def _rotation(self, x: Tensor) -> tuple[Tensor, Tensor]:
        length, key = x.shape[1], self.mix.positions.key(x.shape[1])

        def compute() -> tuple[Tensor, Tensor]:
            positions = self.mix.positions(length, device=x.device)
            return rotation(positions, head_dim=self.head_dim, theta=self.rope_theta, like=x)

        precise = x.dtype == torch.float64
        return self._tables(None if key is None else (key, precise), compute, device=x.device)


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, dim: int, *, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Head(LanguageHead):
    """The last norm and the projection to logits."""

    projection = "output"

    def __init__(self, dim: int, *, vocab_size: int, norm_eps: float) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim, eps=norm_eps)
        self.output = nn.Linear(dim, vocab_size, bias=False)


def rotation(positions: Tensor, *, head_dim: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [seq, head_dim / 2] of position x theta^(-2i / head_dim), for the `positions` [seq].

    They are not buffers, because buffers would need care in meta construction, casts and cuts. Angles are
    computed in float64, because a float32 angle of position 100,000 has an error of 0.004.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    angles = positions.double()[:, None] * torch.pow(theta, -exponents)
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate each pair (i, i + head_dim / 2) of `x` [batch, head, seq, head_dim] by its angle."""
    cos, sin = cos_sin
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
