"""A U-Net (Ronneberger et al. 2015) as many repositories have it: with padding and BatchNorm."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn


class DoubleConv(nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.double_conv = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.double_conv(x)


class Up(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, bilinear: bool) -> None:
        super().__init__()
        if bilinear:
            self.up: nn.Module = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
            self.conv = DoubleConv(in_channels + out_channels, out_channels)
        else:
            self.up = nn.ConvTranspose2d(in_channels, out_channels, kernel_size=2, stride=2)
            self.conv = DoubleConv(2 * out_channels, out_channels)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.conv(torch.cat([skip, self.up(x)], dim=1))


class UNet(nn.Module):
    def __init__(self, n_channels: int, n_classes: int, width: int = 64, bilinear: bool = False) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.inc = DoubleConv(n_channels, widths[0])
        self.down = nn.ModuleList(
            nn.Sequential(nn.MaxPool2d(2), DoubleConv(before, after)) for before, after in pairwise(widths)
        )
        self.up = nn.ModuleList(
            Up(below, level, bilinear) for level, below in reversed(list(pairwise(widths)))
        )
        self.outc = nn.Conv2d(widths[0], n_classes, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        levels = [self.inc(x)]
        for down in self.down:
            levels.append(down(levels[-1]))
        x = levels.pop()
        for up in self.up:
            x = up(x, levels.pop())
        return self.outc(x)
