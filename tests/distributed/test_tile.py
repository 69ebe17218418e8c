"""Tiles against one device: any network, any size, any grid; outputs and all gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.problems import ConfigError
from hpc_parallel.strategies import batch_norm, halo
from hpc_parallel.strategies.tile import split_image, tile_layers, tile_maps
from tests.marks import in_full
from tests.workers import Workers

GRIDS = [(2, 2), *in_full([((1, 2),), ((2, 1),)])]


@dataclass(frozen=True)
class Net:
    """A network as its layers' options, and the images it gets."""

    layers: tuple[tuple[str, dict[str, Any]], ...]
    height: int
    width: int
    pixelwise: bool
    seed: int

    def build(self, dtype: torch.dtype) -> LayeredModel:
        torch.manual_seed(self.seed)
        kinds = {
            "conv": nn.Conv2d, "max": nn.MaxPool2d, "mean": nn.AvgPool2d, "norm": nn.BatchNorm2d,
            "transposed": nn.ConvTranspose2d, "group": nn.GroupNorm, "instance": nn.InstanceNorm2d,
            "upsample": nn.Upsample, "pad": nn.ConstantPad2d, "squeeze": Squeeze,
        }  # fmt: skip
        blocks = [kinds[kind](**options) for kind, options in self.layers]
        head = nn.Conv2d(4, 3, 1) if self.pixelwise else nn.Sequential(nn.Flatten(), nn.LazyLinear(3))
        model = Loss(stem=nn.Identity(), blocks=blocks, head=head)
        model.pixelwise = self.pixelwise
        model(torch.zeros(2, 2, self.height, self.width))
        return model.to(dtype)


class Loss(LayeredModel):
    """A weighted sum of the outputs: every one of them has a gradient of its own.

    With tanh behind each weight, no norm takes out what a weight before it does, which would leave that
    weight no gradient but rounding.
    """

    def forward(self, x: Tensor) -> Tensor:
        assert self.stem is not None
        assert self.head is not None
        x = self.stem(x)
        for block in self.blocks.values():
            x = torch.tanh(block(x)) if any(True for _ in block.parameters()) else block(x)
        return self.head(x)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return (output * target).sum()


class Squeeze(nn.Module):
    """Channels weighted by their means over the cells of the image (squeeze and excitation)."""

    def __init__(self, channels: int, cells: tuple[int, int]) -> None:
        super().__init__()
        self.pool, self.mix = nn.AdaptiveAvgPool2d(cells), nn.Conv2d(channels, channels, cells)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.mix(self.pool(x)))


class Function(nn.Module):
    """A block that calls functions, each with the last one's output and, from the second on, the input."""

    def __init__(self, *functions: Callable[..., Tensor]) -> None:
        super().__init__()
        self.functions = functions
        self.layers = nn.ModuleList(f for f in functions if isinstance(f, nn.Module))

    def forward(self, x: Tensor) -> Tensor:
        out = self.functions[0](x)
        for function in self.functions[1:]:
            out = function(out, x)
        return out


OTHER_KINDS = ("norm", "group", "instance", "squeeze", "upsample", "pad", "transposed")


def other_layer(
    draw: st.DrawFn, kind: str, *, channels: int, size: list[int]
) -> tuple[dict[str, Any], list[int], int]:
    """The options of a layer that is no window, the size of its output, and its channels."""
    if kind == "norm":
        return {"num_features": channels}, size, channels
    if kind == "group":
        return {"num_groups": draw(st.sampled_from([1, channels])), "num_channels": channels}, size, channels
    if kind == "instance":
        return {"num_features": channels, "affine": draw(st.booleans())}, size, channels
    if kind == "squeeze":
        cells = tuple(draw(st.integers(1, 3)) for _ in range(2))
        return {"channels": channels, "cells": cells}, size, channels
    if kind == "pad":
        left, right, top, bottom = (draw(st.integers(-1, 3)) for _ in range(4))
        after = [size[0] + top + bottom, size[1] + left + right]
        return {"padding": (left, right, top, bottom), "value": 0.5}, after, channels
    if kind == "upsample":
        factors = [draw(st.sampled_from([1.0, 1.5, 2.0, 2.7])) for _ in range(2)]
        options = {"scale_factor": tuple(factors), "mode": "bilinear", "align_corners": draw(st.booleans())}
        return options, [math.floor(n * factor) for n, factor in zip(size, factors, strict=True)], channels
    kernel, stride, dilation = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    reach = dilation * (kernel - 1)
    padding, extra = draw(st.integers(0, reach)), draw(st.integers(0, max(stride, dilation) - 1))
    options = {
        "kernel_size": kernel, "stride": stride, "dilation": dilation, "padding": padding,
        "output_padding": extra, "in_channels": channels, "out_channels": 4, "groups": channels // 2,
    }  # fmt: skip
    return options, [(n - 1) * stride - 2 * padding + reach + extra + 1 for n in size], 4


@st.composite
def nets(draw: st.DrawFn) -> Net:
    """Networks whose every map has at least 2 x 2 places."""
    size = [draw(st.integers(9, 30)), draw(st.integers(9, 30))]
    start, channels = tuple(size), 2
    layers: list[tuple[str, dict[str, Any]]] = []
    for _ in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(["conv", "conv", "max", "mean", *OTHER_KINDS]))
        if kind in OTHER_KINDS:
            options, after, width = other_layer(draw, kind, channels=channels, size=size)
            if min(after) >= 2 and max(after) <= 60:
                layers.append((kind, options))
                size, channels = after, width
            continue
        kernel = draw(st.sampled_from([1, 3, 5, 7] if kind == "conv" else [2, 3]))
        dilation = draw(st.integers(1, 3)) if kind != "mean" else 1
        reach = dilation * (kernel - 1) + 1
        stride = draw(st.integers(1, 3))
        padding = draw(st.integers(0, reach // 2 if kind == "conv" else kernel // 2))
        ceil = kind == "max" and draw(st.booleans())
        after = [(math.ceil if ceil else math.floor)((n + 2 * padding - reach) / stride) + 1 for n in size]
        if ceil:  # no window starts in the padding on the right
            after = [m - ((m - 1) * stride >= n + padding) for m, n in zip(after, size, strict=True)]
        if min(after) < 2:
            continue
        options = {"kernel_size": kernel, "stride": stride, "padding": padding}
        if kind != "mean":
            options["dilation"] = dilation
        if kind == "max":
            options["ceil_mode"] = ceil
        if kind == "conv":
            options |= {"in_channels": channels, "out_channels": 4, "bias": draw(st.booleans())}
            channels = 4
        layers.append((kind, options))
        size = after
    if channels == 2:
        layers.append(("conv", {"in_channels": 2, "out_channels": 4, "kernel_size": 3, "padding": 1}))
    pixelwise = draw(st.booleans())
    return Net(tuple(layers), *start, pixelwise=pixelwise, seed=draw(st.integers(0, 99)))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), *in_full([(torch.float32, 1e-5)])], ids=str
)
def test_any_network_in_tiles_is_that_of_one_device(
    workers: Workers, grid: tuple[int, int], dtype: torch.dtype, tolerance: float
) -> None:
    @settings(max_examples=40, deadline=None, derandomize=True, database=None)
    @given(nets())
    def check(net: Net) -> None:
        nonlocal seen
        seen += 1
        for differences in workers.run(math.prod(grid), compare, net, grid, dtype):
            assert max(differences.values()) < tolerance, differences

    seen = 0
    check()
    assert seen >= 40


PLAIN = Net(
    (("conv", {"in_channels": 2, "out_channels": 4, "kernel_size": 3, "padding": 1}),
     ("norm", {"num_features": 4}), ("max", {"kernel_size": 2}),
     ("group", {"num_groups": 2, "num_channels": 4})),
    height=16, width=16, pixelwise=True, seed=0,
)  # fmt: skip


@pytest.mark.parametrize(
    "broken",
    ["halo", "corner", "gradient of a halo", "statistics", "share of the loss", "gradient of a sum"],
)
def test_the_comparison_detects_each_fault(workers: Workers, broken: str) -> None:
    sound = workers.run(4, compare, PLAIN, (2, 2), torch.float64)
    assert max(max(differences.values()) for differences in sound) < 1e-13
    wrong = workers.run(4, compare, PLAIN, (2, 2), torch.float64, broken)
    assert max(max(differences.values()) for differences in wrong) > 1e-3


def test_a_model_that_tiles_do_not_know_is_refused() -> None:
    """An average over the image, for example: a tile's own mean would be silently wrong."""

    def refused(
        *blocks: nn.Module, height: int = 16, grid: tuple[int, int] = (2, 2), pixelwise: bool = False
    ) -> str:
        model = Loss(stem=nn.Identity(), blocks=blocks, head=nn.Conv2d(2, 2, 1)).to("meta")
        model.pixelwise = pixelwise
        with pytest.raises(ConfigError) as error:
            tile_maps.measure(model, sample_shape=(2, height, 16), grid=grid)
        return str(error.value)

    assert "model.blocks.1 calls mean" in refused(
        nn.ReLU(inplace=True), Function(lambda x: x * x.mean((2, 3), keepdim=True))
    )
    assert "calls upsample_bicubic2d" in refused(nn.Upsample(scale_factor=2, mode="bicubic"))
    assert "calls constant_pad_nd" in refused(Function(lambda x: nn.functional.pad(x, (1, 1))))
    assert "model.blocks.0 calls" in refused(Function(lambda x: nn.functional.dropout(x, 0.5)))
    assert "model.blocks.0 calls" in refused(nn.InstanceNorm2d(2, track_running_stats=True))
    assert "calls mul" in refused(Function(nn.AdaptiveAvgPool2d((16, 16)), lambda pooled, x: pooled * x))
    assert "normalises a pooled map" in refused(nn.AdaptiveAvgPool2d(2), nn.BatchNorm2d(2))
    assert "no output for each pixel" in refused(nn.AdaptiveAvgPool2d(2), pixelwise=True)
    pools = [nn.MaxPool2d(2) for _ in range(3)]
    assert "map at model.head has only 1 x 2 positions" in refused(*pools, height=8)
    again = nn.MaxPool2d(2)
    assert "maps of two sizes" in refused(again, again)
    assert "don't divide" in refused(nn.MaxPool2d(2, padding=1), nn.PixelShuffle(1))
    model = Loss(stem=nn.Identity(), blocks=[nn.Conv2d(2, 2, 3, padding_mode="reflect")], head=nn.Identity())
    with pytest.raises(ConfigError, match="padding_mode=reflect"):
        tile_layers.windows_of(model.blocks["0"])


def compare(
    net: Net, grid: tuple[int, int], dtype: torch.dtype, broken: str | None = None
) -> dict[str, float]:
    """Relative differences, by tensor norm, of this rank's tile of one device's forward and backward."""
    with damage(broken):
        return measured(net, grid, dtype)


@contextmanager
def damage(broken: str | None) -> Iterator[None]:
    """One thing done wrong, on all ranks alike."""
    places: dict[str | None, tuple[Any, str, Any]] = {
        "halo": (halo.BoxExchange, "all_to_all", zeros),
        "corner": (halo, "overlap", without_corners(halo.overlap)),
        "gradient of a halo": (halo.Fetch, "backward", staticmethod(without_halo)),
        "statistics": (batch_norm, "apply", lambda model, axis: model),
        "share of the loss": (split_image.Grid, "tiles", 1),
        "gradient of a sum": (tile_layers.SumOverTiles, "backward", staticmethod(lambda _, x: (x, None))),
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        if broken is not None:
            patch.setattr(*places[broken])
        yield


def zeros(exchange: halo.BoxExchange, x: Tensor, pieces: Any, *, expected: Any) -> list[Tensor]:
    return [torch.zeros_like(x[..., :1, :1]) if halo.area(piece) else x[..., :0, :0] for piece in expected]


def without_corners(overlap: Callable[[halo.Box, halo.Box], halo.Box]) -> Callable[..., halo.Box]:
    def cut(have: halo.Box, want: halo.Box) -> halo.Box:
        (top, bottom), (left, right) = found = overlap(have, want)
        return ((0, 0), (0, 0)) if (bottom - top, right - left) == (1, 1) else found

    return cut


def without_halo(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    exchange = ctx.exchange
    total = gradient.new_zeros(ctx.shape)
    total[..., *exchange.give[exchange.rank]] = gradient[..., *exchange.take[exchange.rank]]
    return total, None, None


def measured(net: Net, grid: tuple[int, int], dtype: torch.dtype) -> dict[str, float]:
    mesh = init_device_mesh("cpu", (math.prod(grid),), mesh_dim_names=("tile",))
    alone, tiled = net.build(dtype), net.build(dtype)
    generator = torch.Generator().manual_seed(net.seed)
    images = torch.randn(2, 2, net.height, net.width, generator=generator, dtype=dtype)
    weights = torch.randn(alone(images).shape, generator=generator, dtype=dtype)
    alone = net.build(dtype)  # with fresh running statistics
    whole = images.clone().requires_grad_()
    expected = alone(whole)
    alone.loss(expected, weights).backward()

    maps = tile_maps.measure(
        net.build(torch.float32).to("meta"), sample_shape=tuple(images.shape[1:]), grid=grid
    )
    split_image.apply(tiled, axis=mesh["tile"], grid=grid, maps=maps)
    batch_norm.apply(tiled, axis=mesh["tile"])
    part = images.clone().requires_grad_()
    output = tiled(part)
    loss = split_image.loss_of_tile(tiled.loss, axis=mesh["tile"], grid=grid, pixelwise=tiled.pixelwise)(
        output, weights
    )
    loss.backward()
    tiles = split_image.Grid(*grid, rank=mesh.get_local_rank(), group=mesh.get_group())
    assert part.grad is not None
    assert whole.grad is not None
    found = {
        "output": (output, tiles.crop(expected) if net.pixelwise else expected),
        # a rank's images stand for all ranks' share of its tile; gradients end as the mean over tiles
        "images": (tiles.crop(part.grad) / mesh.size(), tiles.crop(whole.grad)),
    }
    for name, parameter in tiled.named_parameters():
        assert parameter.grad is not None
        found[name] = (summed(parameter.grad) / mesh.size(), alone.get_parameter(name).grad)
    for name, buffer in tiled.named_buffers():
        found[name] = (buffer.to(dtype), alone.get_buffer(name).to(dtype))
    differences = {name: distance(*pair) for name, pair in found.items()}
    scale = torch.linalg.vector_norm(expected) * torch.linalg.vector_norm(weights)  # the sum may cancel
    differences["loss"] = float(abs(summed(loss.detach()) - alone.loss(expected, weights)) / scale)
    return differences


def summed(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor


def distance(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    size = torch.linalg.vector_norm(wanted)
    return float(torch.linalg.vector_norm(found - wanted) / size.clamp(min=1e-3))
