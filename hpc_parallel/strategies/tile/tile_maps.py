"""Measures the maps of a model on meta tensors and finds what tiles can't compute exactly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.problems import raise_if_any
from hpc_parallel.strategies.dropout.dropout_shapes import CHANNELWISE, ELEMENTWISE
from hpc_parallel.strategies.halo import Size
from hpc_parallel.strategies.tile.tile_layers import NORMS, PADDINGS, POOLS, RESIZES, WINDOWS
from hpc_parallel.torch_internals import BatchNorm, DispatchMode, tree_leaves

LAYERS = (*WINDOWS, nn.ConvTranspose2d, *RESIZES, *PADDINGS, *NORMS, *POOLS)
DROPOUTS = (*ELEMENTWISE, *CHANNELWISE)
COPIES = ("detach", "clone", "alias", "_to_copy")


@dataclass(frozen=True)
class Maps:
    """Sizes of the whole input and output maps of each module that works on tiles, by its name."""

    inputs: Mapping[str, Size]
    outputs: Mapping[str, Size]


def measure(model: LayeredModel, *, sample_shape: tuple[int, ...], grid: tuple[int, int]) -> Maps:
    """Run the whole `model` on meta and check that it can compute tiles of `sample_shape` exactly.

    Raises ConfigError for an operation that may mix positions in a way that tiles don't support, for a map
    with less than one position per tile, and for a module that is used on maps of two sizes.
    """
    tried = deepcopy(model).to("meta")  # tables that a constructor has computed are not on meta yet
    constants = {id(tensor) for tensor in (*tried.parameters(), *tried.buffers())}
    recorder = MapRecorder(full_maps={"head"} if not model.pixelwise else set(), constants=constants)
    for name, module in tried.named_modules():
        module.register_forward_pre_hook(partial(recorder.enter, name))
        module.register_forward_hook(partial(recorder.leave, name))
    images = torch.empty(2, *sample_shape, device="meta")  # two: BatchNorm can't train on a single value
    with torch.no_grad(), recorder:
        output = tried(images)
    if model.pixelwise and recorder.is_full(output):
        recorder.problems.append(
            "strategy.tile: the model pools its maps, so it has no output for each pixel."
        )
    maps = Maps(inputs=recorder.inputs, outputs=recorder.outputs)
    pools = {name for name, module in model.named_modules() if isinstance(module, POOLS)}
    raise_if_any(
        [*recorder.problems, *too_small(maps, grid, pools=pools), *unequal_resizes(model, maps, grid)]
    )
    return maps


def too_small(maps: Maps, grid: tuple[int, int], *, pools: set[str]) -> list[str]:
    """Returns a problem for the first map with fewer positions than tiles."""
    outputs = {name: size for name, size in maps.outputs.items() if name not in pools}
    for name, size in [*maps.inputs.items(), *outputs.items()]:
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
        if isinstance(module, RESIZES) and name in maps.inputs and not _is_bilinear(module):
            before, after = maps.inputs[name], maps.outputs[name]
            if any(size % tiles for size, tiles in zip((*before, *after), (*grid, *grid), strict=True)):
                problems.append(
                    f"strategy.tile: model.{name} resizes its map from {before[0]} x {before[1]} to "
                    f"{after[0]} x {after[1]} positions, which {grid[0]} x {grid[1]} tiles don't divide. "
                    "Try another image size."
                )
    return problems


def _is_bilinear(module: nn.Module) -> bool:
    return isinstance(module, nn.Upsample) and module.mode == "bilinear"


def _is_supported(module: nn.Module) -> bool:
    if isinstance(module, nn.Upsample):
        return _is_bilinear(module) or (module.mode == "nearest" and module.size is None)
    if isinstance(module, nn.InstanceNorm2d):
        return not module.track_running_stats
    return isinstance(module, (*LAYERS, *DROPOUTS, BatchNorm))


@dataclass
class MapRecorder(DispatchMode):
    """Records the maps of supported modules, and a problem for each other operation that isn't pointwise.

    A tensor that depends only on pooled maps is whole on every device, so any operation may use it.
    """

    full_maps: set[str]  # modules that get the whole map
    constants: set[int]  # ids of the weights and buffers
    inputs: dict[str, Size] = field(default_factory=dict)
    outputs: dict[str, Size] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.running: list[tuple[str, bool]] = []  # modules on the call stack, and whether tiles support them
        self.reported: set[str] = set()
        self.full: dict[int, Tensor] = {}  # id -> tensor, kept so that no other tensor gets this id

    def is_full(self, value: Any) -> bool:
        return isinstance(value, Tensor) and id(value) in self.full

    def enter(self, name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        supported = _is_supported(module) or name in self.full_maps
        if supported and not self._inside_supported() and not self.is_full(inputs[0]):
            if name in self.full_maps and len(inputs) > 1:
                self.problems.append(f"strategy.tile: model.{name} takes several maps. Try strategy=data.")
            size = (inputs[0].shape[-2], inputs[0].shape[-1])
            if self.inputs.setdefault(name, size) != size:
                self.problems.append(
                    f"strategy.tile: model.{name} is used on maps of two sizes, {self.inputs[name]} and "
                    f"{size}. Try a separate module for each use."
                )
        if isinstance(module, BatchNorm) and self.is_full(inputs[0]):
            self._report(name, "normalises a pooled map over the batch, but each tile has all of that map")
        self.running.append((name, supported))

    def leave(self, name: str, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, supported = self.running.pop()
        on_tiles = supported and name not in self.full_maps and not self._inside_supported()
        if on_tiles and not self.is_full(inputs[0]):
            self.outputs[name] = (output.shape[-2], output.shape[-1])
            if isinstance(module, POOLS):
                self.full[id(output)] = output

    def _inside_supported(self) -> bool:
        return any(supported for _, supported in self.running)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        operation = function.overloadpacket.__name__
        across_channels = operation == "cat" and args[1:] == (1,)
        pointwise = torch.Tag.pointwise in function.tags or operation in COPIES or across_channels
        random = torch.Tag.nondeterministic_seeded in function.tags
        maps = list(self._maps(args, kwargs))
        full = [tensor for tensor in maps if self.is_full(tensor)]
        if full and len(full) == len(maps):
            self.full |= {id(tensor): tensor for tensor in tree_leaves(output) if isinstance(tensor, Tensor)}
            pointwise = True
        elif any(tensor.numel() != tensor.shape[:2].numel() for tensor in full) or (full and across_channels):
            pointwise = False  # it combines a whole map with a tile
        if (random or not pointwise) and not self._inside_supported():
            caller = next((name for name, _ in reversed(self.running) if name), "forward")
            self._report(caller, f"calls {operation}, which may need inputs beyond a tile")
        return output

    def _maps(self, args: Any, kwargs: Any) -> Iterator[Tensor]:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and id(leaf) not in self.constants and leaf.dim() > 0:
                yield leaf

    def _report(self, name: str, clause: str) -> None:
        if name not in self.reported:
            self.reported.add(name)
            names = ", ".join(dict.fromkeys(kind.__name__ for kind in LAYERS))
            self.problems.append(
                f"strategy.tile: model.{name} {clause}. Tiles support {names}, BatchNorm, dropout "
                "and pointwise operations. Try strategy=data."
            )
