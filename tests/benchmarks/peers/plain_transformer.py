"""The reference transformer as a good engineer writes it by hand: plain torch, tables of angles made once.

Its weights have the names of `hpc_parallel.models.transformer`, so that both sides load the same ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Tables = tuple[Tensor, Tensor]


class Attention(nn.Module):
    def __init__(self, dim: int, *, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.width = dim // heads
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, kv_heads * self.width, bias=False)
        self.value = nn.Linear(dim, kv_heads * self.width, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, tables: Tables) -> Tensor:
        batch, seq, dim = x.shape
        query, key, value = (
            projection(x).view(batch, seq, -1, self.width).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        grouped = query.shape[1] != key.shape[1]
        mixed = F.scaled_dot_product_attention(
            rotate(query, tables), rotate(key, tables), value, is_causal=True, enable_gqa=grouped
        )
        return self.output(mixed.transpose(1, 2).reshape(batch, seq, dim))


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, shape: dict[str, Any]) -> None:
        super().__init__()
        dim, eps = shape["dim"], shape["norm_eps"]
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(dim, eps=eps), nn.RMSNorm(dim, eps=eps)
        self.attention = Attention(dim, heads=shape["heads"], kv_heads=shape["kv_heads"])
        self.feed_forward = FeedForward(dim, shape["ffn_dim"])

    def forward(self, x: Tensor, tables: Tables) -> Tensor:
        x = x + self.attention(self.attention_norm(x), tables)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Head(nn.Module):
    def __init__(self, shape: dict[str, Any]) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(shape["dim"], eps=shape["norm_eps"])
        self.output = nn.Linear(shape["dim"], shape["vocab_size"], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.norm(x))


class PlainTransformer(nn.Module):
    """The blocks `first` to `last`; the embedding before block 0, the head after the last block."""

    def __init__(self, shape: dict[str, Any], *, seq: int, first: int = 0, last: int | None = None) -> None:
        super().__init__()
        last = shape["layers"] if last is None else last
        self.stem = nn.Embedding(shape["vocab_size"], shape["dim"]) if first == 0 else None
        self.blocks = nn.ModuleDict({str(index): Block(shape) for index in range(first, last)})
        self.head = Head(shape) if last == shape["layers"] else None
        if shape["tied_head"] and self.stem is not None and self.head is not None:
            self.head.output.weight = self.stem.weight
        width = shape["dim"] // shape["heads"]
        exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
        angles = torch.arange(seq)[:, None] * shape["rope_theta"] ** -exponents
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.stem is None else self.stem(x)
        for block in self.blocks.values():
            x = block(x, (self.cos, self.sin))
        return x if self.head is None else self.head(x)


def rotate(x: Tensor, tables: Tables) -> Tensor:
    """Rotate each pair (i, i + width / 2) of `x` [batch, head, seq, width] by its angle."""
    cos, sin = tables
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean loss of a token."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
