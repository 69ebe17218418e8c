"""Exchange of pieces of a map between the devices that hold its tiles, with gradients.

`spans` cuts every map by its size alone, so tiles of two maps of one size always match. A box is the part of
a map that a tile needs: the tile and its halo with corners, or the whole map. `BoxExchange` fetches one box
for each device in a single all-to-all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from hpc_parallel.strategies.ranges import marked

Span = tuple[int, int]  # first row or column, and one past the last
Box = tuple[Span, Span]  # rows, columns of the whole map; padding lies beyond its border
Size = tuple[int, int]  # height, width


@dataclass(frozen=True)
class Grid:
    """The tiles of an image, row by row over the ranks of `group`."""

    rows: int
    columns: int
    rank: int  # of this process in `group`
    group: dist.ProcessGroup

    @property
    def tiles(self) -> int:
        return self.rows * self.columns

    def boxes(self, size: Size) -> list[Box]:
        """Each rank's tile of a map of this size."""
        height, width = size
        return [
            (rows, columns) for rows in spans(height, self.rows) for columns in spans(width, self.columns)
        ]

    def crop(self, x: Tensor) -> Tensor:
        """This rank's tile of a whole map [..., height, width]."""
        height, width = x.shape[-2:]
        (top, bottom), (left, right) = self.boxes((height, width))[self.rank]
        return x[..., top:bottom, left:right]

    def exchange(self, size: Size, wanted: Sequence[Box]) -> BoxExchange:
        """The exchange that gives each rank its `wanted` box of a map of this size."""
        return BoxExchange(have=self.boxes(size), want=list(wanted), rank=self.rank, group=self.group)


def spans(length: int, parts: int) -> list[Span]:
    """Divide `length` rows into `parts` as evenly as possible; depends on these two numbers only."""
    return [(length * part // parts, length * (part + 1) // parts) for part in range(parts)]


def overlap(first: Box, second: Box) -> Box:
    """The intersection of two boxes; an empty one is ((0, 0), (0, 0))."""
    shared = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True)]
    if any(start >= end for start, end in shared):
        return (0, 0), (0, 0)
    rows, columns = shared
    return rows, columns


@dataclass(frozen=True)
class BoxExchange:
    """Rank r of `group` has the box have[r] of a map, and gets want[r]."""

    have: Sequence[Box]
    want: Sequence[Box]
    rank: int
    group: dist.ProcessGroup

    @cached_property
    def give(self) -> list[tuple[slice, slice]]:
        """The piece of this rank's tile that each rank gets."""
        tile = self.have[self.rank]
        return [within(overlap(tile, want), tile) for want in self.want]

    @cached_property
    def take(self) -> list[tuple[slice, slice]]:
        """Where each rank's piece goes in this rank's box."""
        box = self.want[self.rank]
        return [within(overlap(have, box), box) for have in self.have]

    @cached_property
    def shape(self) -> Size:
        (top, bottom), (left, right) = self.want[self.rank]
        return bottom - top, right - left

    def __call__(self, tile: Tensor, fill: float = 0.0) -> Tensor:
        """This rank's box [..., height, width] of the map whose `tile` it has; padding is `fill`."""
        return Fetch.apply(tile, self, fill)  # type: ignore[no-any-return]

    def all_to_all(
        self, x: Tensor, pieces: Sequence[tuple[slice, slice]], *, expected: Sequence[tuple[slice, slice]]
    ) -> list[Tensor]:
        """Send a piece of `x` to each of the other ranks, and return the pieces that they send.

        This rank's own entry is empty.
        """
        leading = x.shape[:-2]
        outgoing = [x[..., *piece].reshape(-1) for rank, piece in enumerate(pieces) if rank != self.rank]
        sent_counts = [leading.numel() * area(piece) for piece in pieces]
        received_counts = [leading.numel() * area(piece) for piece in expected]
        sent_counts[self.rank] = received_counts[self.rank] = 0
        received = x.new_empty(sum(received_counts))
        message = torch.cat(outgoing)
        with marked("all_to_all tile"):
            dist.all_to_all_single(received, message, received_counts, sent_counts, group=self.group)
        shapes = [(*leading, *(part.stop - part.start for part in piece)) for piece in expected]
        shapes[self.rank] = (0,)
        return [part.view(shape) for part, shape in zip(received.split(received_counts), shapes, strict=True)]


class Fetch(torch.autograd.Function):
    """The exchange. In the backward pass each piece's gradient returns to its owner, which adds them up."""

    @staticmethod
    def forward(ctx: Any, tile: Tensor, exchange: BoxExchange, fill: float) -> Tensor:
        ctx.exchange, ctx.shape = exchange, tile.shape
        box = tile.new_full((*tile.shape[:-2], *exchange.shape), fill)
        pieces = exchange.all_to_all(tile, exchange.give, expected=exchange.take)
        pieces[exchange.rank] = tile[..., *exchange.give[exchange.rank]]
        for region, piece in zip(exchange.take, pieces, strict=True):
            box[..., *region] = piece
        return box

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        exchange = ctx.exchange
        total = gradient.new_zeros(ctx.shape)
        pieces = exchange.all_to_all(gradient, exchange.take, expected=exchange.give)
        pieces[exchange.rank] = gradient[..., *exchange.take[exchange.rank]]
        for region, piece in zip(exchange.give, pieces, strict=True):
            total[..., *region] += piece
        return total, None, None


def within(box: Box, outer: Box) -> tuple[slice, slice]:
    """`box` as slices of a tensor that holds `outer`."""
    if box == ((0, 0), (0, 0)):
        return slice(0, 0), slice(0, 0)
    (top, bottom), (left, right) = box
    (first_row, _), (first_column, _) = outer
    return slice(top - first_row, bottom - first_row), slice(left - first_column, right - first_column)


def area(piece: tuple[slice, slice]) -> int:
    rows, columns = piece
    return int((rows.stop - rows.start) * (columns.stop - columns.start))
