"""The layers of a tiled image: which inputs a layer needs beyond this device's tile, and how it runs on them.

`before` and `after` are the sizes of a layer's whole input and output maps. Boxes, rows and columns are
positions in the whole map.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from hpc_parallel.problems import ConfigError
from hpc_parallel.strategies.halo import Box, BoxExchange, Grid, Size, Span
from hpc_parallel.strategies.ranges import marked
from hpc_parallel.strategies.replace_forward import Forward, replace_forward

WINDOWS = (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d)
# If the tiles divide both maps evenly, these layers need no input beyond the tile (bilinear Upsample does).
RESIZES = (nn.PixelShuffle, nn.PixelUnshuffle, nn.Upsample)
PADDINGS = (nn.ZeroPad2d, nn.ConstantPad2d)
NORMS = (nn.GroupNorm, nn.InstanceNorm2d)
POOLS = (nn.AdaptiveAvgPool2d,)  # every device gets the whole output
TECHNIQUE = "Tiled"  # a prefix of the class name of a replaced layer


@dataclass(frozen=True)
class Window:
    """The inputs of one output of a convolution or pooling, along one dim."""

    kernel: int
    stride: int
    padding: int
    dilation: int

    def inputs(self, outputs: Span) -> Span:
        """The input rows that these output rows need. The first row of the padding is -padding."""
        first, end = outputs
        start = first * self.stride - self.padding
        return start, (end - 1) * self.stride - self.padding + self.dilation * (self.kernel - 1) + 1

    def sources(self, outputs: Span) -> Span:
        """The inputs that a transposed convolution needs for these outputs. Inputs beyond the map are 0."""
        first, end = outputs
        reach = self.dilation * (self.kernel - 1)
        return (first + self.padding - reach) // self.stride, -(-(end - 1 + self.padding) // self.stride) + 1


def tile_layer(module: nn.Module, *, tiles: Grid, before: Size, after: Size) -> None:
    """Let `module` compute this device's tile of its output. A layer in `POOLS` computes its whole output."""
    if isinstance(module, WINDOWS):
        _window(module, tiles=tiles, before=before, after=after)
    elif isinstance(module, nn.ConvTranspose2d):
        _transposed(module, tiles=tiles, before=before, after=after)
    elif isinstance(module, PADDINGS):
        _padded(module, tiles=tiles, before=before, after=after)
    elif isinstance(module, NORMS):
        replace_forward(module, partial(normalise, tiles, before), technique=TECHNIQUE)
    elif isinstance(module, POOLS):
        replace_forward(module, partial(pool, tiles, before, after), technique=TECHNIQUE)
    elif isinstance(module, nn.Upsample) and module.mode == "bilinear":
        _interpolated(module, tiles=tiles, before=before, after=after)


def fetch_before(module: nn.Module, exchange: BoxExchange, *, fill: float = 0.0) -> None:
    """Let `module` first fetch the inputs that its outputs need beyond this rank's tile."""

    def forward(original: Forward, module: nn.Module, tile: Tensor) -> Tensor:
        return original(module, exchange(tile, fill))

    if exchange.have != exchange.want:  # the same answer on all ranks
        replace_forward(module, forward, technique=TECHNIQUE)


def _needed(
    tiles: Grid, *, before: Size, after: Size, rows: Callable[[Span], Span], columns: Callable[[Span], Span]
) -> BoxExchange:
    """The exchange that gives each tile of the output the inputs that it needs."""
    boxes: list[Box] = [(rows(height), columns(width)) for height, width in tiles.boxes(after)]
    return tiles.exchange(before, boxes)


def _window(module: Any, *, tiles: Grid, before: Size, after: Size) -> None:
    vertical, horizontal = windows_of(module)
    exchange = _needed(tiles, before=before, after=after, rows=vertical.inputs, columns=horizontal.inputs)
    fetch_before(module, exchange, fill=-math.inf if isinstance(module, nn.MaxPool2d) else 0.0)
    module.padding = (0, 0)
    if not isinstance(module, nn.Conv2d):
        module.ceil_mode = False


def windows_of(module: Any) -> tuple[Window, Window]:
    """The windows of `module` along height and width.

    Raises ConfigError for padding that a tile can't compute from its own input.
    """
    unsupported = None
    kernel, stride = pair(module.kernel_size), pair(module.stride)
    dilation = pair(getattr(module, "dilation", 1))
    padding = pair(module.padding) if not isinstance(module.padding, str) else (0, 0)
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        if module.padding_mode != "zeros":
            unsupported = f"padding_mode={module.padding_mode}"
        if module.padding == "same":
            padding = (dilation[0] * (kernel[0] - 1) // 2, dilation[1] * (kernel[1] - 1) // 2)
    elif isinstance(module, nn.AvgPool2d):
        if module.ceil_mode or (any(padding) and not module.count_include_pad):
            unsupported = "windows of unequal sizes (ceil_mode=True or count_include_pad=False)"
    elif getattr(module, "return_indices", False):
        unsupported = "return_indices=True"
    if unsupported:
        raise ConfigError(
            [f"strategy.tile: {module} has {unsupported}, which tiles don't support. Try strategy=data."]
        )
    height, width = (Window(*fields) for fields in zip(kernel, stride, padding, dilation, strict=True))
    return height, width


def pair(value: Any) -> tuple[int, int]:
    first, second = value if isinstance(value, tuple | list) else (value, value)
    return first, second


def _transposed(module: nn.ConvTranspose2d, *, tiles: Grid, before: Size, after: Size) -> None:
    """Each input adds to several outputs: compute all outputs of the box, and cut out this tile's."""
    windows = windows_of(module)
    exchange = _needed(tiles, before=before, after=after, rows=windows[0].sources, columns=windows[1].sources)
    cut = [
        slice(first - start * window.stride + window.padding, end - start * window.stride + window.padding)
        for (first, end), (start, _), window in zip(
            tiles.boxes(after)[tiles.rank], exchange.want[tiles.rank], windows, strict=True
        )
    ]

    def forward(_: Forward, module: Any, tile: Tensor) -> Tensor:
        outputs = F.conv_transpose2d(
            exchange(tile), module.weight, module.bias, stride=module.stride, dilation=module.dilation,
            groups=module.groups,
        )  # fmt: skip
        return outputs[..., cut[0], cut[1]]

    replace_forward(module, forward, technique=TECHNIQUE)


def _padded(module: Any, *, tiles: Grid, before: Size, after: Size) -> None:
    """The padding lies beyond the whole map, so the exchanged box includes it and is the output."""
    left, _, top, _ = module.padding
    exchange = _needed(
        tiles, before=before, after=after, rows=lambda span: (span[0] - top, span[1] - top),
        columns=lambda span: (span[0] - left, span[1] - left),
    )  # fmt: skip

    def forward(_: Forward, module: Any, tile: Tensor) -> Tensor:
        return exchange(tile, float(module.value))

    replace_forward(module, forward, technique=TECHNIQUE)


@dataclass(frozen=True)
class Interpolation:
    """The two inputs between which each output lies, along one dim, as in torch's bilinear mode.

    The position of output `o` in the input is `slope * o + offset`, or 0 if this value is negative.
    """

    slope: float
    offset: float
    length: int  # of the input

    def position(self, output: int) -> float:
        return max(0.0, self.slope * output + self.offset)

    def inputs(self, outputs: Span) -> Span:
        """The inputs that these outputs need."""
        first, end = outputs
        return math.floor(self.position(first)), min(math.floor(self.position(end - 1)) + 2, self.length)

    def apply(self, x: Tensor, *, dim: int, outputs: Span, start: int) -> Tensor:
        """Interpolate `x` along `dim`. The first input in `x` is number `start` of the whole map."""
        numbers = torch.arange(*outputs, dtype=torch.float64, device=x.device)
        position = (numbers * self.slope + self.offset).clamp(min=0)
        lower = position.floor().long().clamp(max=self.length - 1)
        upper = (lower + 1).clamp(max=self.length - 1)
        share = (position - lower).to(x.dtype).view(-1, *[1] * (-dim - 1))
        below, above = (x.index_select(dim, index - start) for index in (lower, upper))
        return below * (1 - share) + above * share


def _interpolated(module: Any, *, tiles: Grid, before: Size, after: Size) -> None:
    factors = (None, None) if module.scale_factor is None else pair(module.scale_factor)
    if module.recompute_scale_factor:
        factors = (None, None)
    axes = [
        interpolation(*sizes, factor=factor, align_corners=bool(module.align_corners))
        for *sizes, factor in zip(before, after, factors, strict=True)
    ]
    exchange = _needed(tiles, before=before, after=after, rows=axes[0].inputs, columns=axes[1].inputs)
    rows, columns = tiles.boxes(after)[tiles.rank]
    (top, _), (left, _) = exchange.want[tiles.rank]

    def forward(_: Forward, module: Any, tile: Tensor) -> Tensor:
        x = axes[0].apply(exchange(tile), dim=-2, outputs=rows, start=top)
        return axes[1].apply(x, dim=-1, outputs=columns, start=left)

    replace_forward(module, forward, technique=TECHNIQUE)


def interpolation(before: int, after: int, *, factor: float | None, align_corners: bool) -> Interpolation:
    """torch's rule (aten/src/ATen/native/UpSample.h): from `before` inputs to `after` outputs."""
    if align_corners:
        return Interpolation((before - 1) / (after - 1) if after > 1 else 0.0, 0.0, before)
    slope = before / after if factor is None else 1 / factor
    return Interpolation(slope, 0.5 * slope - 0.5, before)


def normalise(tiles: Grid, size: Size, _: Forward, norm: Any, x: Tensor) -> Tensor:
    """Group or instance norm of `x` [batch, channel, h, w] by the moments of each whole map of `size`.

    The variance sums squared deviations from the mean of the whole map, because E[x^2] - E[x]^2 would cancel.
    """
    channels = x.shape[1]
    groups = norm.num_groups if isinstance(norm, nn.GroupNorm) else channels
    count = size[0] * size[1] * channels // groups
    grouped = x.to(torch.promote_types(x.dtype, torch.float32)).reshape(len(x), groups, -1)
    mean = SumOverTiles.apply(grouped.sum(-1, keepdim=True).double(), tiles.group) / count
    centred = grouped - mean.to(grouped.dtype)
    variance = SumOverTiles.apply(centred.square().sum(-1, keepdim=True).double(), tiles.group) / count
    out = (centred * torch.rsqrt(variance + norm.eps).to(grouped.dtype)).reshape(x.shape)
    if norm.weight is not None:
        out = out * norm.weight.view(-1, 1, 1) + norm.bias.view(-1, 1, 1)
    return out.to(x.dtype)  # type: ignore[no-any-return]


def pool(tiles: Grid, before: Size, after: Size, _: Forward, module: Any, x: Tensor) -> Tensor:
    """The mean of each cell of the whole map, on every device. Each device adds the share of its pixels."""
    rows, columns = (
        _cells(span, length=length, cells=cells, like=x)
        for span, length, cells in zip(tiles.boxes(before)[tiles.rank], before, after, strict=True)
    )
    return SumOverTiles.apply(rows @ x @ columns.T, tiles.group)  # type: ignore[no-any-return]


def _cells(span: Span, *, length: int, cells: int, like: Tensor) -> Tensor:
    """The weight of each of this tile's rows in each cell's mean: [cells, rows]."""
    numbers = torch.arange(cells, device=like.device).unsqueeze(1)
    starts, ends = numbers * length // cells, ((numbers + 1) * length + cells - 1) // cells
    rows = torch.arange(*span, device=like.device)
    inside = (rows >= starts) & (rows < ends)
    return inside.to(like.dtype) / (ends - starts).to(like.dtype)


class SumOverTiles(torch.autograd.Function):
    """The sum over all tiles. Each tile's loss depends on it, so gradients are summed too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)
        with marked("all_reduce tile"):
            dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        with marked("all_reduce tile"):
            dist.all_reduce(total, group=ctx.group)
        return total, None
