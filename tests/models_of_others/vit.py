"""SimpleViT: a vision transformer with fixed positions and mean pooling (Beyer, Zhai, Kolesnikov 2022)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def sincos_2d(rows: int, columns: int, dim: int, temperature: float = 10000.0) -> Tensor:
    """Sine and cosine of row and column: [rows * columns, dim]."""
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    frequencies = temperature ** -(torch.arange(dim // 4) / (dim // 4 - 1))
    y, x = y.reshape(-1, 1) * frequencies, x.reshape(-1, 1) * frequencies
    return torch.cat((x.sin(), x.cos(), y.sin(), y.cos()), dim=1)


class Patches(nn.Module):
    """[batch, channel, height, width] -> [batch, patch, channel * size * size]"""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, images: Tensor) -> Tensor:
        patches = images.unfold(2, self.size, self.size).unfold(3, self.size, self.size)
        return patches.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.to_qkv(self.norm(x)).chunk(3, dim=-1)
        )
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        return self.to_out((scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Transformer(nn.Module):
    def __init__(self, dim: int, depth: int, heads: int, mlp_dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.layers = nn.ModuleList(
            nn.ModuleList([Attention(dim, heads), FeedForward(dim, mlp_dim)]) for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        for attention, feed in self.layers:
            x = x + attention(x)
            x = x + feed(x)
        return self.norm(x)


class SimpleViT(nn.Module):
    """Images [batch, channel, height, width] of floats -> logits [batch, num_classes]."""

    def __init__(
        self,
        *,
        image_size: tuple[int, int],
        patch_size: int,
        num_classes: int,
        dim: int,
        depth: int,
        heads: int,
        mlp_dim: int,
        channels: int = 3,
    ) -> None:
        super().__init__()
        patch_dim = channels * patch_size**2
        self.to_patch_embedding = nn.Sequential(
            Patches(patch_size), nn.LayerNorm(patch_dim), nn.Linear(patch_dim, dim), nn.LayerNorm(dim)
        )
        self.grid, self.dim = (image_size[0] // patch_size, image_size[1] // patch_size), dim
        self.pos_embedding = self.positions()
        self.transformer = Transformer(dim, depth, heads, mlp_dim)
        self.linear_head = nn.Linear(dim, num_classes)

    def positions(self) -> Tensor:
        return sincos_2d(*self.grid, self.dim)

    def forward(self, images: Tensor) -> Tensor:
        x = self.to_patch_embedding(images)
        x = x + self.pos_embedding.to(x)
        return self.linear_head(self.transformer(x).mean(dim=1))
