"""Moving pieces of a map between the devices that hold its tiles, with gradients.

A map of any size is cut by one rule, `spans`: its size alone says which rows and columns a tile has, so
maps of one size always fit each other. What a tile needs beyond itself (a halo, its corners, or all of
the map) is a box; `Exchange` fetches one box for each device in a single all-to-all.
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

Span = tuple[int, int]  # first, and one past the last
Box = tuple[Span, Span]  # rows, columns; of the whole map, and beyond its border where there is padding
Size = tuple[int, int]  # height, width


@dataclass(frozen=True)
class Grid:
    """The tiles of an image, row by row over the ranks of `group`; `place` is this rank's."""

    rows: int
    columns: int
    place: int
    group: dist.ProcessGroup

    @property
    def tiles(self) -> int:
        return self.rows * self.columns

    def boxes(self, size: Size) -> list[Box]:
        """The tile of each rank of a map of this size."""
        height, width = size
        return [
            (rows, columns) for rows in spans(height, self.rows) for columns in spans(width, self.columns)
        ]

    def crop(self, x: Tensor) -> Tensor:
        """This rank's tile of a whole map [..., height, width]."""
        height, width = x.shape[-2:]
        (top, bottom), (left, right) = self.boxes((height, width))[self.place]
        return x[..., top:bottom, left:right]

    def exchange(self, size: Size, wanted: Sequence[Box]) -> Exchange:
        """What brings each rank its box of a map of this size."""
        return Exchange(have=self.boxes(size), want=list(wanted), place=self.place, group=self.group)


def spans(length: int, parts: int) -> list[Span]:
    """`length` rows in `parts` as equal as can be; which is the same wherever `length` is."""
    return [(length * part // parts, length * (part + 1) // parts) for part in range(parts)]


def overlap(first: Box, second: Box) -> Box:
    """What two boxes share; empty spans start and end at the same place."""
    shared = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True)]
    if any(start >= end for start, end in shared):
        return (0, 0), (0, 0)
    rows, columns = shared
    return rows, columns


@dataclass(frozen=True)
class Exchange:
    """Rank r of `group` has the box have[r] of a map, and gets want[r]."""

    have: Sequence[Box]
    want: Sequence[Box]
    place: int
    group: dist.ProcessGroup

    @property
    def needless(self) -> bool:
        """Whether everyone has just what it wants (asked alike on all ranks)."""
        return list(self.have) == list(self.want)

    @cached_property
    def give(self) -> list[tuple[slice, slice]]:
        """For each rank, what it gets of this rank's tile."""
        return [within(overlap(self.have[self.place], want), self.have[self.place]) for want in self.want]

    @cached_property
    def take(self) -> list[tuple[slice, slice]]:
        """For each rank, where in this rank's box its piece goes."""
        return [within(overlap(have, self.want[self.place]), self.want[self.place]) for have in self.have]

    @cached_property
    def shape(self) -> Size:
        (top, bottom), (left, right) = self.want[self.place]
        return bottom - top, right - left

    def __call__(self, tile: Tensor, fill: float = 0.0) -> Tensor:
        """This rank's box [..., height, width] of the map whose `tile` it holds; `fill` beyond the border."""
        return Fetch.apply(tile, self, fill)  # type: ignore[no-any-return]

    def trade(
        self, x: Tensor, pieces: Sequence[tuple[slice, slice]], *, expected: Sequence[tuple[slice, slice]]
    ) -> list[Tensor]:
        """Send each peer its piece of `x`, and return theirs; a rank's own is not sent."""
        leading = x.shape[:-2]
        here = self.place
        sent = [x[..., *piece].reshape(-1) for rank, piece in enumerate(pieces) if rank != here]
        given = [0 if rank == here else leading.numel() * area(piece) for rank, piece in enumerate(pieces)]
        taken = [0 if rank == here else leading.numel() * area(piece) for rank, piece in enumerate(expected)]
        received = x.new_empty(sum(taken))
        dist.all_to_all_single(received, torch.cat(sent), taken, given, group=self.group)
        shapes = [(*leading, *(part.stop - part.start for part in piece)) for piece in expected]
        shapes[here] = (0,)
        return [part.view(shape) for part, shape in zip(received.split(taken), shapes, strict=True)]


class Fetch(torch.autograd.Function):
    """The exchange; backward, each piece's gradient goes back to whom it came from, and is added there."""

    @staticmethod
    def forward(ctx: Any, tile: Tensor, exchange: Exchange, fill: float) -> Tensor:
        ctx.exchange, ctx.shape = exchange, tile.shape
        box = tile.new_full((*tile.shape[:-2], *exchange.shape), fill)
        pieces = exchange.trade(tile, exchange.give, expected=exchange.take)
        pieces[exchange.place] = tile[..., *exchange.give[exchange.place]]
        for place, piece in zip(exchange.take, pieces, strict=True):
            box[..., *place] = piece
        return box

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        exchange = ctx.exchange
        total = gradient.new_zeros(ctx.shape)
        pieces = exchange.trade(gradient, exchange.take, expected=exchange.give)
        pieces[exchange.place] = gradient[..., *exchange.take[exchange.place]]
        for place, piece in zip(exchange.give, pieces, strict=True):
            total[..., *place] += piece
        return total, None, None


def within(box: Box, outer: Box) -> tuple[slice, slice]:
    """`box` as slices of a tensor that holds `outer`."""
    if box == ((0, 0), (0, 0)):
        return slice(0, 0), slice(0, 0)
    (top, bottom), (left, right) = box
    (down, _), (across, _) = outer
    return slice(top - down, bottom - down), slice(left - across, right - across)


def area(piece: tuple[slice, slice]) -> int:
    rows, columns = piece
    return int((rows.stop - rows.start) * (columns.stop - columns.start))
