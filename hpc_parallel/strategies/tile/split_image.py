"""Spatial parallelism: each device computes one tile of an image, exact at every border (Dryden et al. 2019).

Every device has all weights. The loss of a tile is its share of the image's loss, so gradients are averaged
over tiles as over replicas. A convolution or pooling first fetches the inputs that its outputs need beyond
the tile, corners included, and then runs without padding (`tile_layers.py`). BatchNorm takes its statistics
over the whole image (`batch_norm.py`). A head that needs the whole image gets it on every device.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hpc_parallel.models.layered import LayeredModel, Loss
from hpc_parallel.strategies.halo import Box, Grid
from hpc_parallel.strategies.loss import MetricsOf
from hpc_parallel.strategies.replace_forward import Forward, replace_forward
from hpc_parallel.strategies.tile.tile_layers import fetch_before, tile_layer
from hpc_parallel.strategies.tile.tile_maps import Maps


def apply(model: LayeredModel, *, axis: DeviceMesh, grid: tuple[int, int], maps: Maps) -> LayeredModel:
    """Let `model` (or a stage of it) take whole images and compute this rank's tile of them.

    `maps` come from `tile_maps.measure` on the whole model. Use `loss_of_tile` as the loss.
    """
    tiles = grid_of(axis, grid)
    for name, module in model.named_modules():
        if name in maps.outputs:
            tile_layer(module, tiles=tiles, before=maps.inputs[name], after=maps.outputs[name])
    if model.stem is not None:
        replace_forward(model.stem, partial(crop_before, tiles), technique="Cropped")
    # A head that gets a pooled map already has the whole map.
    if model.head is not None and not model.pixelwise and "head" in maps.inputs:
        height, width = maps.inputs["head"]
        full_map: Box = ((0, height), (0, width))
        fetch_before(model.head, tiles.exchange((height, width), [full_map] * tiles.tiles))
    return model


def grid_of(axis: DeviceMesh, grid: tuple[int, int]) -> Grid:
    """The tiles of `axis` in a `grid` of rows and columns."""
    rows, columns = grid
    return Grid(rows=rows, columns=columns, rank=axis.get_local_rank(), group=axis.get_group())


def metrics_of_tile(
    metrics: MetricsOf, *, axis: DeviceMesh, grid: tuple[int, int], pixelwise: bool
) -> MetricsOf:
    """Returns metrics that are this tile's share of `metrics`."""
    tiles = grid_of(axis, grid)

    def share_of_metrics(output: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        if pixelwise:
            return metrics(output, tiles.crop(target))
        return {name: value / tiles.tiles for name, value in metrics(output, target).items()}

    return share_of_metrics


def crop_before(tiles: Grid, forward: Forward, stem: nn.Module, image: Tensor) -> Tensor:
    return forward(stem, tiles.crop(image))


def loss_of_tile(loss: Loss, *, axis: DeviceMesh, grid: tuple[int, int], pixelwise: bool) -> Loss:
    """Returns a loss that is this tile's share of `loss`; the shares of an image add up to it.

    If the head needs the whole image (not `pixelwise`), every device computes the loss of the image and
    divides it by the number of tiles.
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
