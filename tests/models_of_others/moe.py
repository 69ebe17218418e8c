"""A decoder with a mixture of experts in each block, like Mixtral (Jiang et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class MixtralArgs:
    dim: int = 32
    n_layers: int = 3
    head_dim: int = 8
    n_heads: int = 4
    n_kv_heads: int = 2
    hidden_dim: int = 48
    vocab_size: int = 256
    num_experts: int = 4
    num_experts_per_tok: int = 2
    norm_eps: float = 1e-5
    rope_theta: float = 1e6


def rotations(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles: [seq, head_dim / 2] each."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device) / head_dim
    angles = positions[:, None] * theta**-exponents
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of neighbours (Su et al. 2021): [batch, seq, head, head_dim]."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    def __init__(self, args: MixtralArgs) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = args.n_heads, args.n_kv_heads, args.head_dim
        self.wq = nn.Linear(args.dim, args.n_heads * args.head_dim, bias=False)
        self.wk = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=False)
        self.wv = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=False)
        self.wo = nn.Linear(args.n_heads * args.head_dim, args.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = rotate(self.wq(x).unflatten(-1, (self.n_heads, self.head_dim)), cos, sin)
        k = rotate(self.wk(x).unflatten(-1, (self.n_kv_heads, self.head_dim)), cos, sin)
        v = self.wv(x).unflatten(-1, (self.n_kv_heads, self.head_dim))
        k, v = (part.repeat_interleave(self.n_heads // self.n_kv_heads, dim=2) for part in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / self.head_dim**0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        shares = scores.masked_fill(future, -torch.inf).softmax(dim=-1)
        return self.wo(torch.einsum("bhqk,bkhd->bqhd", shares, v).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, args: MixtralArgs) -> None:
        super().__init__()
        self.w1 = nn.Linear(args.dim, args.hidden_dim, bias=False)
        self.w2 = nn.Linear(args.hidden_dim, args.dim, bias=False)
        self.w3 = nn.Linear(args.dim, args.hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class MoeLayer(nn.Module):
    """Each token's output is the weighted mean of its best experts' outputs."""

    def __init__(self, args: MixtralArgs) -> None:
        super().__init__()
        self.per_token = args.num_experts_per_tok
        self.experts = nn.ModuleList(FeedForward(args) for _ in range(args.num_experts))
        self.gate = nn.Linear(args.dim, args.num_experts, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        scores, chosen = self.gate(tokens).topk(self.per_token)
        shares = scores.softmax(dim=-1)
        out = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            token, rank = torch.where(chosen == index)
            out[token] += shares[token, rank, None] * expert(tokens[token])
        return out.view_as(x)


class TransformerBlock(nn.Module):
    def __init__(self, args: MixtralArgs) -> None:
        super().__init__()
        self.attention = Attention(args)
        self.feed_forward = MoeLayer(args)
        self.attention_norm = RMSNorm(args.dim, args.norm_eps)
        self.ffn_norm = RMSNorm(args.dim, args.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Mixtral(nn.Module):
    """Tokens [batch, seq] -> logits [batch, seq, vocab_size]."""

    def __init__(self, args: MixtralArgs) -> None:
        super().__init__()
        self.args = args
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleList(TransformerBlock(args) for _ in range(args.n_layers))
        self.norm = RMSNorm(args.dim, args.norm_eps)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        cos, sin = rotations(positions, self.args.head_dim, self.args.rope_theta)
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.output(self.norm(x))
