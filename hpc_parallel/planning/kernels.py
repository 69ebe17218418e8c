"""The times of the operations of a decoder's parts, each computed once for all plans on one hardware."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hpc_parallel.planning.decoder import Share
from hpc_parallel.planning.hardware import Hardware
from hpc_parallel.planning.operations import Operation

_PARTS: dict[str, Callable[[Share], list[Operation]]] = {
    "block forward": Share.block,
    "block backward": Share.block_backward,
    "embedding": Share.embedding,
    "embedding backward": Share.embedding_backward,
    "head": Share.head,
    "head backward": Share.head_backward,
}


@dataclass(frozen=True)
class Term:
    """One number of a plan, with the formula and the inputs that it comes from."""

    name: str
    seconds: float
    formula: str


class Terms(list[Term]):
    """The terms of a plan, collected while they are computed."""

    def add(self, name: str, seconds: float, formula: str) -> float:
        """Add a term and return its seconds."""
        self.append(Term(name, seconds, formula))
        return seconds


class Kernels:
    """The terms of a decoder's parts on one hardware."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._terms: dict[tuple[str, str, Share], tuple[Term, ...]] = {}

    def terms(self, part: str, share: Share, *, precision: str) -> tuple[Term, ...]:
        """One term for each operation of a part (_PARTS). Raises KeyError for a precision without a peak."""
        key = (part, precision, share)
        if key not in self._terms:
            peak, name = self._hardware.device.peak_flops[precision], part.removesuffix(" backward")
            where = part if part.startswith("block") else name
            self._terms[key] = tuple(
                Term(f"{where}: {one.name}", one.seconds(self._hardware, peak=peak), one.formula())
                for one in _PARTS[part](share)
            )
        return self._terms[key]
