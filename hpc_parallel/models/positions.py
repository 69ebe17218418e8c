"""The positions of a sequence that this device has. Techniques that split a sequence replace `Positions`."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch
from torch import Tensor

Tables = TypeVar("Tables")


class Positions:
    """The whole sequence: the indices 0, 1, 2, ..."""

    def __call__(self, length: int, *, device: torch.device) -> Tensor:
        """Returns the indices in the sample of this device's `length` positions: [length], int64."""
        return torch.arange(length, device=device)

    def key(self, length: int) -> Hashable | None:
        """A key of the indices: equal keys mean equal indices. None if nothing is known about them."""
        return length if type(self) is Positions else None


class PositionTables(Generic[Tables]):
    """Tables of the positions, such as their angles, computed once for all blocks and recomputations.

    Compiled code only reads tables of earlier calls, because a compiled recomputation may not write.
    """

    def __init__(self) -> None:
        self._by_device: dict[str, tuple[Hashable, Tables]] = {}  # nn.DataParallel has several

    def __call__(
        self, key: Hashable | None, compute: Callable[[], Tables], *, device: torch.device
    ) -> Tables:
        """The tables of the last call with this `key`, or new ones. Without a key, they are always new."""
        if key is None:
            return compute()
        kept = self._by_device.get(str(device))
        if kept is None or kept[0] != key:
            if torch.compiler.is_compiling():
                return compute()
            kept = key, compute()
            self._by_device[str(device)] = kept
        return kept[1]
