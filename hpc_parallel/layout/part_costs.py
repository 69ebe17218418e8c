"""The cost of each part of a model. Pipeline stages are balanced by these costs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PartCosts:
    """The cost of each part of a model, all in the same unit."""

    stem: int
    blocks: tuple[int, ...]
    head: int

    @property
    def total(self) -> int:
        """The cost of the whole model."""
        return self.stem + sum(self.blocks) + self.head


class PartFlops(PartCosts):
    """FLOPs of one sample's forward pass by part; a multiplication and an addition count as two."""
