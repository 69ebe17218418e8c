"""How far a run is from one device's: losses of all steps, gradients of the first, weights after the last."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_parallel.record.metrics_file import MetricsReader
from hpc_parallel.record.run_folder import RunFolder

Tensors = Mapping[str, Sequence[NDArray[Any]]]  # by full name, every version that a rank has


@dataclass(frozen=True)
class Difference:
    """The largest relative difference, and what it is of."""

    value: float
    where: str

    def __str__(self) -> str:
        return f"{self.value:.1e}"


@dataclass(frozen=True)
class Tolerance:
    """The largest relative differences that are still equal, and the reason."""

    losses: float
    gradients: float
    weights: float
    why: str


@dataclass(frozen=True)
class Verdict:
    """`word`: equal, MISS, failed or left out. `reasons`: a line for each, unless the word is equal."""

    word: str
    reasons: Sequence[str] = ()
    differences: dict[str, Difference] = field(default_factory=dict)


TOLERANCES = {
    "float32": Tolerance(
        losses=1e-5, gradients=1e-5, weights=1e-4,
        why="float32 keeps 24 bits (6e-8), and a layout adds the same terms in another order, which costs "
        "some dozens of roundings; weights have gone through all steps, and through Adam's division by what "
        "may be small.",
    ),
    "float64": Tolerance(
        losses=1e-9, gradients=1e-9, weights=1e-9,
        why="float64 keeps 53 bits (1e-16): another order of the same sums stays far below, "
        "so what is left would be a mistake.",
    ),
}  # fmt: skip


def compare(found: RunFolder, wanted: RunFolder) -> dict[str, Difference]:
    """By the names of `Tolerance`. Raises ValueError where a run left nothing to compare."""
    return {
        "losses": _losses(found, wanted),
        "gradients": _tensors(read(found, "gradients"), read(wanted, "gradients")),
        "weights": _tensors(read(found, "weights"), read(wanted, "weights")),
    }


def read(folder: RunFolder, kind: str) -> Tensors:
    """`kind`: gradients or weights. Raises ValueError where there are none."""
    found: dict[str, list[NDArray[Any]]] = defaultdict(list)
    for file in sorted(folder.proof.glob(f"{kind}-*.npz")):
        with np.load(file, allow_pickle=False) as held:
            for name in held.files:
                found[name].append(held[name])
    if not found:
        raise ValueError(f"the run left no {kind} in {folder.proof}")
    return found


def _losses(found: RunFolder, wanted: RunFolder) -> Difference:
    """|a - b| / |b| a step; a loss that is not finite (null in the file) equals nothing."""
    here, there = (
        {line["step"]: line["loss"] for line in MetricsReader(folder.metrics).read()}
        for folder in (found, wanted)
    )
    if here.keys() != there.keys() or not here:
        raise ValueError(f"the run logged {len(here)} steps and one device {len(there)}")
    return _largest(
        (f"step {step}", math.inf if a is None or b is None else _relative(abs(a - b), abs(b)))
        for (step, a), b in zip(here.items(), there.values(), strict=True)
    )


def _tensors(found: Tensors, wanted: Tensors) -> Difference:
    """|a - b| / |b| by tensor norm; what one side lacks, or has in another shape, is infinitely far."""
    return _largest(
        (
            name,
            max(
                (_norm_difference(a, b) for a in found.get(name, ()) for b in wanted.get(name, ())),
                default=math.inf,
            ),
        )
        for name in sorted({*found, *wanted})
    )


def _largest(differences: Iterable[tuple[str, float]]) -> Difference:
    where, value = max(differences, key=lambda item: item[1])
    return Difference(value, where)


def _norm_difference(a: NDArray[Any], b: NDArray[Any]) -> float:
    if a.shape != b.shape:
        return math.inf
    left, right = a.astype(np.float64), b.astype(np.float64)
    return _relative(float(np.linalg.norm(left - right)), float(np.linalg.norm(right)))


def _relative(difference: float, size: float) -> float:
    if not (math.isfinite(difference) and math.isfinite(size)):
        return math.inf
    if difference == 0:
        return 0.0
    return difference / size if size else math.inf
