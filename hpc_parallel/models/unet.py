"""The reference U-Net (Ronneberger, Fischer & Brox 2015): a label for each pixel, with skip connections.

Each part hands on the hidden state and the outputs of earlier levels that later parts still need. A stage of
a pipeline therefore sends several tensors to the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpc_parallel.models.convnet import ImageModel, Pixels
from hpc_parallel.models.layered import PartFlops


class UNet(ImageModel):
    """Images uint8 [batch, channel, height, width] -> logits of each pixel [batch, classes, height, width].

    With n numbers of `channels` it has n - 1 blocks that each halve height and width, one block at the
    bottom, and n - 1 blocks that each double them. Height and width must be multiples of 2^(n - 1).

    Raises ValueError if `kernel_size` is even.
    """

    pixelwise = True

    def __init__(
        self, *, channels: Sequence[int], classes: int, in_channels: int = 1, kernel_size: int = 3
    ) -> None:
        if kernel_size % 2 == 0:
            raise ValueError(f"model.kernel_size = {kernel_size} must be odd: an even kernel has no centre")
        down = (
            Down(before, after, kernel_size=kernel_size)
            for before, after in zip([in_channels, *channels], channels[:-1], strict=False)
        )
        bottom = Bottom([in_channels, *channels][-2], channels[-1], kernel_size=kernel_size)
        up = (
            Up(below, level, kernel_size=kernel_size) for level, below in reversed(list(pairwise(channels)))
        )
        super().__init__(stem=Pixels(), blocks=(*down, bottom, *up), head=nn.Conv2d(channels[0], classes, 1))
        self.in_channels, self.label_count = in_channels, classes

    def forward_flops(self, sample_shape: tuple[int, ...]) -> PartFlops:
        """2 FLOPs for each weight of a convolution and each position of its output."""
        positions = sample_shape[-2] * sample_shape[-1]
        blocks = []
        for block in self.blocks.values():
            positions = positions * 4 if isinstance(block, Up) else positions
            weights = [weight.numel() for weight in block.parameters() if weight.dim() > 1]
            blocks.append(2 * positions * sum(weights))
            positions = positions // 4 if isinstance(block, Down) else positions
        head = 0 if self.head is None else 2 * positions * self.head.weight.numel()  # type: ignore[operator]
        return PartFlops(stem=0, blocks=tuple(blocks), head=head)


class Twice(nn.Module):
    """Two times ReLU(BatchNorm(Conv(x))): [batch, before, h, w] -> [batch, after, h, w]."""

    def __init__(self, before: int, after: int, *, kernel_size: int) -> None:
        super().__init__()
        padding = kernel_size // 2
        self.conv1 = nn.Conv2d(before, after, kernel_size, padding=padding, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, kernel_size, padding=padding, bias=False)
        self.norm2 = nn.BatchNorm2d(after)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(x)))


class Down(nn.Module):
    """x, skips -> x with half its height and width, the skips, and a new skip [batch, after, h, w]."""

    def __init__(self, before: int, after: int, *, kernel_size: int) -> None:
        super().__init__()
        self.twice = Twice(before, after, kernel_size=kernel_size)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor, *skips: Tensor) -> tuple[Tensor, ...]:
        skip = self.twice(x)
        return self.pool(skip), *skips, skip


class Bottom(nn.Module):
    """x, skips -> x of more channels, skips."""

    def __init__(self, before: int, after: int, *, kernel_size: int) -> None:
        super().__init__()
        self.twice = Twice(before, after, kernel_size=kernel_size)

    def forward(self, x: Tensor, *skips: Tensor) -> tuple[Tensor, ...]:
        return self.twice(x), *skips


class Up(nn.Module):
    """x, skips -> x twice as large, joined with the last skip; the other skips.

    Each position becomes four, and a convolution follows (Odena, Dumoulin & Olah 2016): a transposed
    convolution would leave a checkerboard.
    """

    def __init__(self, below: int, level: int, *, kernel_size: int) -> None:
        super().__init__()
        self.up = nn.Upsample(scale_factor=2, mode="nearest")
        self.narrow = nn.Conv2d(below, level, kernel_size, padding=kernel_size // 2)
        self.twice = Twice(2 * level, level, kernel_size=kernel_size)

    def forward(self, x: Tensor, *skips: Tensor) -> tuple[Tensor, ...]:
        *others, skip = skips
        return self.twice(torch.cat([skip, self.narrow(self.up(x))], dim=1)), *others
