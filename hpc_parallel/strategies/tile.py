"""Tiles: an image in a grid over devices, exact at every border (spatial parallelism, Dryden et al. 2019).

Weights are tied: every device has all of them and learns from its tile, so with the loss of a tile as its
share of the image's, tiles are averaged over like replicas. A convolution or a pooling first fetches what its
outputs need beyond its tile, corners too, then runs without padding. BatchNorm takes its statistics over the
whole image (`batch_norm.py`). A head that looks at the whole image gets it, on every device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hpc_parallel.models.layered import LayeredModel, Loss
from hpc_parallel.problems import ConfigError
from hpc_parallel.strategies.halo import Box, Exchange, Grid, Size, Span
from hpc_parallel.strategies.replace_forward import Forward, replace_forward
from hpc_parallel.torch_internals import BatchNorm, DispatchMode

WINDOWS = (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d)
# Each output place depends on one input place, or the other way round, if tiles start where both do.
RESIZES = (nn.PixelShuffle, nn.PixelUnshuffle, nn.Upsample)
COPIES = ("detach", "clone", "alias", "_to_copy")


@dataclass(frozen=True)
class Window:
    """What one output of a convolution or pooling sees, along one dim."""

    kernel: int
    stride: int
    padding: int
    dilation: int

    def inputs(self, outputs: Span) -> Span:
        """The rows (from -padding on) that these output rows need."""
        first, end = outputs
        start = first * self.stride - self.padding
        return start, (end - 1) * self.stride - self.padding + self.dilation * (self.kernel - 1) + 1


@dataclass(frozen=True)
class Maps:
    """Sizes of the maps that each part of a model takes and gives, by the part's name."""

    inputs: Mapping[str, Size]
    outputs: Mapping[str, Size]


def apply(model: LayeredModel, *, axis: DeviceMesh, grid: tuple[int, int], maps: Maps) -> LayeredModel:
    """Let `model` (or a stage of it) work on this rank's tile of whole images that it is given.

    `maps`: of the whole model, by `measure`. The loss is then that of `loss_of_tile`.
    """
    tiles = grid_of(axis, grid)
    head = model.head if not model.pixelwise else None
    within_head = set() if head is None else set(head.modules())
    for name, module in model.named_modules():
        if isinstance(module, WINDOWS) and module not in within_head:
            outputs = tiles.boxes(maps.outputs[name])
            across = windows_of(module)
            wanted = [tuple(w.inputs(s) for w, s in zip(across, box, strict=True)) for box in outputs]
            fill = -torch.inf if isinstance(module, nn.MaxPool2d) else 0.0
            fetch_before(module, tiles.exchange(maps.inputs[name], wanted), fill=fill)  # type: ignore[arg-type]
            module.padding = (0, 0)
            if not isinstance(module, nn.Conv2d):
                module.ceil_mode = False
    if model.stem is not None:
        replace_forward(model.stem, partial(crop_before, tiles), technique="Cropped")
    if head is not None:
        height, width = maps.inputs["head"]
        everything: Box = ((0, height), (0, width))
        fetch_before(head, tiles.exchange((height, width), [everything] * tiles.tiles))
    return model


def grid_of(axis: DeviceMesh, grid: tuple[int, int]) -> Grid:
    """Where this rank of `axis` stands in a `grid` of rows and columns."""
    rows, columns = grid
    return Grid(rows=rows, columns=columns, place=axis.get_local_rank(), group=axis.get_group())


def crop_before(tiles: Grid, forward: Forward, stem: nn.Module, image: Tensor) -> Tensor:
    return forward(stem, tiles.crop(image))


def fetch_before(module: nn.Module, exchange: Exchange, *, fill: float = 0.0) -> None:
    """Let `module` first fetch what its outputs need beyond this rank's tile."""

    def forward(before: Forward, module: nn.Module, tile: Tensor) -> Tensor:
        return before(module, exchange(tile, fill))

    if not exchange.needless:
        replace_forward(module, forward, technique="Tiled")


def loss_of_tile(loss: Loss, *, axis: DeviceMesh, grid: tuple[int, int], pixelwise: bool) -> Loss:
    """This tile's share of `loss`; the shares of an image add up to it.

    If the head sees the whole image (not `pixelwise`), every device has its loss and counts a part. Gradients
    are averaged over the tiles, as over replicas, while the loss is their sum: hence the factor.
    """
    tiles = grid_of(axis, grid)

    def share_of_loss(output: Tensor, target: Tensor) -> Tensor:
        share = loss(output, tiles.crop(target)) if pixelwise else loss(output, target) / tiles.tiles
        if share.requires_grad:
            share.register_hook(lambda gradient: gradient * tiles.tiles)
        return share

    return share_of_loss


def windows_of(module: nn.Module) -> tuple[Window, Window]:
    """Along height and width. Raises ConfigError for a padding that a tile can't make by itself."""
    wrong = None
    kernel, stride = pair(module.kernel_size), pair(module.stride)
    dilation = pair(getattr(module, "dilation", 1))
    padding = pair(module.padding) if not isinstance(module.padding, str) else (0, 0)
    if isinstance(module, nn.Conv2d):
        if module.padding_mode != "zeros":
            wrong = f"padding_mode={module.padding_mode}"
        if module.padding == "same":
            padding = (dilation[0] * (kernel[0] - 1) // 2, dilation[1] * (kernel[1] - 1) // 2)
    elif isinstance(module, nn.AvgPool2d):
        if module.ceil_mode or (any(padding) and not module.count_include_pad):
            wrong = "means over a part of its window"
    elif getattr(module, "return_indices", False):
        wrong = "return_indices=True"
    if wrong:
        raise ConfigError(
            [f"strategy.tile: {module} has {wrong}, which tiles don't know. Try strategy=data."]
        )
    height, width = (Window(*of) for of in zip(kernel, stride, padding, dilation, strict=True))
    return height, width


def pair(value: Any) -> tuple[int, int]:
    first, second = value if isinstance(value, tuple | list) else (value, value)
    return first, second


def measure(model: LayeredModel, *, sample_shape: tuple[int, ...], grid: tuple[int, int]) -> Maps:
    """Run the whole `model` on meta, and see that tiles of `sample_shape` can go through it exactly.

    Raises ConfigError for an operation that would mix places unseen by this technique, for a map with
    less than one place a tile, and for a module that is used on maps of two sizes.
    """
    watch = Watch(whole={"head"} if not model.pixelwise else set())
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(partial(watch.enter, name)))
        handles.append(module.register_forward_hook(partial(watch.leave, name)))
    images = torch.empty(2, *sample_shape, device="meta")  # two: BatchNorm can't train on a single value
    with torch.no_grad(), watch:
        model(images)
    for handle in handles:
        handle.remove()
    for name, size in [*watch.inputs.items(), *watch.outputs.items()]:
        if any(places < tiles for places, tiles in zip(size, grid, strict=True)):
            watch.problems.append(
                f"strategy.tile: at model.{name} the image is down to {size[0]} x {size[1]} places, too few "
                f"for {grid[0]} x {grid[1]} tiles. Try a larger image or fewer tiles."
            )
            break
    for name, module in model.named_modules():
        if isinstance(module, RESIZES) and name in watch.inputs:
            before, after = watch.inputs[name], watch.outputs[name]
            if any(
                places % tiles for size in (before, after) for places, tiles in zip(size, grid, strict=True)
            ):
                watch.problems.append(
                    f"strategy.tile: model.{name} makes {after[0]} x {after[1]} places of {before[0]} x "
                    f"{before[1]}, which {grid[0]} x {grid[1]} tiles don't divide. Try another image size."
                )
    if watch.problems:
        raise ConfigError(watch.problems)
    return Maps(inputs=watch.inputs, outputs=watch.outputs)


@dataclass
class Watch(DispatchMode):
    """Notes the size of the map at each known part, and every operation elsewhere that is not pointwise."""

    whole: set[str]  # parts that get the whole map
    inputs: dict[str, Size] = field(default_factory=dict)
    outputs: dict[str, Size] = field(default_factory=dict)
    problems: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.within: list[tuple[str, bool]] = []  # the parts that run now, and whether tiles know them
        self.blamed: set[str] = set()

    def enter(self, name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        known = isinstance(module, (*WINDOWS, *RESIZES, BatchNorm)) or name in self.whole
        if isinstance(module, nn.Upsample):
            known = module.mode == "nearest" and module.size is None
        if known and not any(known for _, known in self.within):
            size = (inputs[0].shape[-2], inputs[0].shape[-1])
            if self.inputs.setdefault(name, size) != size:
                self.problems.append(
                    f"strategy.tile: model.{name} is used on maps of two sizes, {self.inputs[name]} and "
                    f"{size}. Give each use a module of its own."
                )
        self.within.append((name, known))

    def leave(self, name: str, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, known = self.within.pop()
        if known and name not in self.whole and not any(known for _, known in self.within):
            self.outputs[name] = (output.shape[-2], output.shape[-1])

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation = function.overloadpacket.__name__
        across_channels = operation == "cat" and args[1:] == (1,)
        by_itself = torch.Tag.pointwise in function.tags or operation in COPIES or across_channels
        random = torch.Tag.nondeterministic_seeded in function.tags
        place = next((name for name, _ in reversed(self.within) if name), "forward")
        unknown = (random or not by_itself) and not any(known for _, known in self.within)
        if unknown and place not in self.blamed:
            self.blamed.add(place)
            self.problems.append(
                f"strategy.tile: model.{place} calls {operation}, of which tiles don't know what it needs "
                f"beyond a tile. They know {', '.join(kind.__name__ for kind in (*WINDOWS, *RESIZES))}, "
                "BatchNorm and what treats each place by itself. Try strategy=data."
            )
        return function(*args, **(kwargs or {}))
