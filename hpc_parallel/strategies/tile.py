"""Spatial parallelism: each device computes one tile of an image, exact at every border (Dryden et al. 2019).

Every device has all weights. The loss of a tile is its share of the image's loss, so gradients are averaged
over tiles as over replicas. A convolution or pooling first fetches what its outputs need beyond the tile,
corners included, and then runs without padding. BatchNorm takes its statistics over the whole image
(`batch_norm.py`). A head that needs the whole image gets it on every device.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hpc_parallel.models.layered import LayeredModel, Loss
from hpc_parallel.problems import ConfigError
from hpc_parallel.strategies.dropout_shapes import CHANNELWISE, ELEMENTWISE
from hpc_parallel.strategies.halo import Box, Exchange, Grid, Size, Span
from hpc_parallel.strategies.replace_forward import Forward, replace_forward
from hpc_parallel.torch_internals import BatchNorm, DispatchMode

WINDOWS = (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d)
# If the tiles divide both maps evenly, each output position depends on one input position or the reverse.
RESIZES = (nn.PixelShuffle, nn.PixelUnshuffle, nn.Upsample)
COPIES = ("detach", "clone", "alias", "_to_copy")


@dataclass(frozen=True)
class Window:
    """The inputs of one output of a convolution or pooling, along one dim."""

    kernel: int
    stride: int
    padding: int
    dilation: int

    def inputs(self, outputs: Span) -> Span:
        """The input rows that these output rows need. Rows of the padding count from -padding."""
        first, end = outputs
        start = first * self.stride - self.padding
        return start, (end - 1) * self.stride - self.padding + self.dilation * (self.kernel - 1) + 1


@dataclass(frozen=True)
class Maps:
    """Sizes of the input and output maps of each module, by its name."""

    inputs: Mapping[str, Size]
    outputs: Mapping[str, Size]


def apply(model: LayeredModel, *, axis: DeviceMesh, grid: tuple[int, int], maps: Maps) -> LayeredModel:
    """Let `model` (or a stage of it) take whole images and compute this rank's tile of them.

    `maps` come from `measure` on the whole model. Use `loss_of_tile` as the loss.
    """
    tiles = grid_of(axis, grid)
    head = model.head if not model.pixelwise else None
    within_head = set() if head is None else set(head.modules())
    for name, module in model.named_modules():
        if isinstance(module, WINDOWS) and module not in within_head:
            vertical, horizontal = windows_of(module)
            wanted = [
                (vertical.inputs(rows), horizontal.inputs(columns))
                for rows, columns in tiles.boxes(maps.outputs[name])
            ]
            fill = -torch.inf if isinstance(module, nn.MaxPool2d) else 0.0
            fetch_before(module, tiles.exchange(maps.inputs[name], wanted), fill=fill)
            module.padding = (0, 0)
            if not isinstance(module, nn.Conv2d):
                module.ceil_mode = False
    if model.stem is not None:
        replace_forward(model.stem, partial(crop_before, tiles), technique="Cropped")
    if head is not None:
        height, width = maps.inputs["head"]
        full_map: Box = ((0, height), (0, width))
        fetch_before(head, tiles.exchange((height, width), [full_map] * tiles.tiles))
    return model


def grid_of(axis: DeviceMesh, grid: tuple[int, int]) -> Grid:
    """The tiles of `axis` in a `grid` of rows and columns."""
    rows, columns = grid
    return Grid(rows=rows, columns=columns, rank=axis.get_local_rank(), group=axis.get_group())


def crop_before(tiles: Grid, forward: Forward, stem: nn.Module, image: Tensor) -> Tensor:
    return forward(stem, tiles.crop(image))


def fetch_before(module: nn.Module, exchange: Exchange, *, fill: float = 0.0) -> None:
    """Let `module` first fetch what its outputs need beyond this rank's tile."""

    def forward(original: Forward, module: nn.Module, tile: Tensor) -> Tensor:
        return original(module, exchange(tile, fill))

    if not exchange.is_identity:
        replace_forward(module, forward, technique="Tiled")


def loss_of_tile(loss: Loss, *, axis: DeviceMesh, grid: tuple[int, int], pixelwise: bool) -> Loss:
    """Returns a loss that is this tile's share of `loss`; the shares of an image add up to it.

    If the head needs the whole image (not `pixelwise`), every device computes its loss and counts a part.
    Gradients are averaged over tiles, as over replicas, but the loss is a sum over tiles. Therefore each
    gradient is multiplied by the number of tiles.
    """
    tiles = grid_of(axis, grid)

    def share_of_loss(output: Tensor, target: Tensor) -> Tensor:
        share = loss(output, tiles.crop(target)) if pixelwise else loss(output, target) / tiles.tiles
        if share.requires_grad:
            share.register_hook(lambda gradient: gradient * tiles.tiles)
        return share

    return share_of_loss


def windows_of(module: nn.Module) -> tuple[Window, Window]:
    """The windows of `module` along height and width.

    Raises ConfigError for padding that a tile can't compute from its own input.
    """
    unsupported = None
    kernel, stride = pair(module.kernel_size), pair(module.stride)
    dilation = pair(getattr(module, "dilation", 1))
    padding = pair(module.padding) if not isinstance(module.padding, str) else (0, 0)
    if isinstance(module, nn.Conv2d):
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


def measure(model: LayeredModel, *, sample_shape: tuple[int, ...], grid: tuple[int, int]) -> Maps:
    """Run the whole `model` on meta and check that it can compute tiles of `sample_shape` exactly.

    Raises ConfigError for an operation that may mix positions in a way that tiles don't support, for a map
    with less than one position per tile, and for a module that is used on maps of two sizes.
    """
    recorder = MapRecorder(full_maps={"head"} if not model.pixelwise else set())
    tried = deepcopy(model).to("meta")  # a table that a constructor computes has values
    for name, module in tried.named_modules():
        module.register_forward_pre_hook(partial(recorder.enter, name))
        module.register_forward_hook(partial(recorder.leave, name))
    images = torch.empty(2, *sample_shape, device="meta")  # two: BatchNorm can't train on a single value
    with torch.no_grad(), recorder:
        tried(images)
    maps = Maps(inputs=recorder.inputs, outputs=recorder.outputs)
    if problems := [*recorder.problems, *too_small(maps, grid), *unequal_resizes(model, maps, grid)]:
        raise ConfigError(problems)
    return maps


def too_small(maps: Maps, grid: tuple[int, int]) -> list[str]:
    """The first map with fewer positions than tiles, as a problem."""
    for name, size in [*maps.inputs.items(), *maps.outputs.items()]:
        if any(positions < tiles for positions, tiles in zip(size, grid, strict=True)):
            return [
                f"strategy.tile: the map at model.{name} has only {size[0]} x {size[1]} positions, too few "
                f"for {grid[0]} x {grid[1]} tiles. Try a larger image or fewer tiles."
            ]
    return []


def unequal_resizes(model: LayeredModel, maps: Maps, grid: tuple[int, int]) -> list[str]:
    """A problem for each resizing module whose input or output the tiles don't divide evenly."""
    problems = []
    for name, module in model.named_modules():
        if isinstance(module, RESIZES) and name in maps.inputs:
            before, after = maps.inputs[name], maps.outputs[name]
            if any(size % tiles for size, tiles in zip((*before, *after), (*grid, *grid), strict=True)):
                problems.append(
                    f"strategy.tile: model.{name} resizes its map from {before[0]} x {before[1]} to "
                    f"{after[0]} x {after[1]} positions, which {grid[0]} x {grid[1]} tiles don't divide. "
                    "Try another image size."
                )
    return problems


@dataclass
class MapRecorder(DispatchMode):
    """Records the maps of supported modules, and a problem for each other operation that isn't pointwise."""

    full_maps: set[str]  # modules that get the whole map
    inputs: dict[str, Size] = field(default_factory=dict)
    outputs: dict[str, Size] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.running: list[tuple[str, bool]] = []  # modules on the call stack, and whether tiles support them
        self.reported: set[str] = set()

    def enter(self, name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        supported = (
            isinstance(module, (*WINDOWS, *RESIZES, BatchNorm, *ELEMENTWISE, *CHANNELWISE))
            or name in self.full_maps
        )
        if isinstance(module, nn.Upsample):
            supported = module.mode == "nearest" and module.size is None
        if supported and not self._inside_supported():
            size = (inputs[0].shape[-2], inputs[0].shape[-1])
            if self.inputs.setdefault(name, size) != size:
                self.problems.append(
                    f"strategy.tile: model.{name} is used on maps of two sizes, {self.inputs[name]} and "
                    f"{size}. Try a separate module for each use."
                )
        self.running.append((name, supported))

    def leave(self, name: str, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, supported = self.running.pop()
        if supported and name not in self.full_maps and not self._inside_supported():
            self.outputs[name] = (output.shape[-2], output.shape[-1])

    def _inside_supported(self) -> bool:
        return any(supported for _, supported in self.running)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation = function.overloadpacket.__name__
        across_channels = operation == "cat" and args[1:] == (1,)
        pointwise = torch.Tag.pointwise in function.tags or operation in COPIES or across_channels
        random = torch.Tag.nondeterministic_seeded in function.tags
        caller = next((name for name, _ in reversed(self.running) if name), "forward")
        unsupported = (random or not pointwise) and not self._inside_supported()
        if unsupported and caller not in self.reported:
            self.reported.add(caller)
            self.problems.append(
                f"strategy.tile: model.{caller} calls {operation}, which may need inputs beyond a tile. "
                f"Tiles support {', '.join(kind.__name__ for kind in (*WINDOWS, *RESIZES))}, BatchNorm and "
                "pointwise operations. Try strategy=data."
            )
        return function(*args, **(kwargs or {}))
