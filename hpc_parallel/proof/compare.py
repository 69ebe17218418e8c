"""Compares a run with one device: losses of all steps, first gradients, and weights after the last step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_parallel.record.metrics_file import MetricsReader
from hpc_parallel.record.run_folder import RunFolder

Tensors = Mapping[str, Sequence[NDArray[Any]]]  # full name -> the array of each rank that has it


@dataclass(frozen=True)
class Difference:
    """The largest relative difference, and the step or tensor that has it."""

    value: float
    where: str

    def __str__(self) -> str:
        return f"{self.value:.1e}"


@dataclass(frozen=True)
class Tolerance:
    """The largest relative differences that count as equal, and the reason."""

    losses: float
    gradients: float
    weights: float
    why: str

    @property
    def bounds(self) -> dict[str, float]:
        return {"losses": self.losses, "gradients": self.gradients, "weights": self.weights}


@dataclass(frozen=True)
class Verdict:
    """`word`: equal, MISS, failed or left out. `reasons`: one line for each, and for other bounds.

    bounds: the largest differences that count as equal in this row, by the names of `differences`.
    """

    word: str
    reasons: Sequence[str] = ()
    differences: dict[str, Difference] = field(default_factory=dict)
    bounds: dict[str, float] = field(default_factory=dict)


TOLERANCES = {
    "float32": Tolerance(
        losses=1e-5, gradients=1e-5, weights=1e-4,
        why="float32 keeps 24 bits (6e-8). A layout adds the same terms in another order, which costs some "
        "dozens of roundings. Weights accumulate the differences of all steps, and Adam divides by values "
        "that may be small.",
    ),
    "float64": Tolerance(
        losses=1e-9, gradients=1e-9, weights=1e-9,
        why="float64 keeps 53 bits (1e-16): another order of the same sums stays far below, "
        "so what is left would be a mistake.",
    ),
    "bfloat16": Tolerance(
        losses=2**-9, gradients=2**-4, weights=2**-4,
        why="bfloat16 keeps 8 bits (4e-3), so only large mistakes show. The rows in float64 find the others.",
    ),
}  # fmt: skip
SHARP = ("float32", "float64")  # what a user may choose


ROUNDED = "float32-parts"  # in the folder `proof` of a model that computes parts in less than float64
LEAST_SHARE = 0.01  # of the model's gradient norm


def compare(run: RunFolder, reference: RunFolder, *, tolerance: Tolerance) -> dict[str, Difference]:
    """The differences by field name of `Tolerance`. Raises ValueError if a run left nothing to compare.

    A gradient that is zero in exact arithmetic, such as that of a key's bias, is noise. It is compared with
    the scale of the model's gradient, and its weight is left out, because Adam amplifies the noise. The
    losses of all steps show what such a weight does.
    """
    gradients = read(reference, "gradients")
    model_norm = math.hypot(*(_norm(arrays[0]) for arrays in gradients.values()))
    noise = {
        name for name, arrays in gradients.items() if 0 < _norm(arrays[0]) < tolerance.gradients * model_norm
    }
    weights, exact_weights = (
        {name: arrays for name, arrays in read(folder, "weights").items() if name not in noise}
        for folder in (run, reference)
    )
    return {
        "losses": _losses(run, reference),
        "gradients": _tensors(read(run, "gradients"), gradients, least_norm=LEAST_SHARE * model_norm),
        "weights": _tensors(weights, exact_weights),
    }


def read(folder: RunFolder, kind: str) -> Tensors:
    """Read the tensors that a run kept. `kind`: gradients or weights. Raises ValueError if there are none."""
    tensors: dict[str, list[NDArray[Any]]] = defaultdict(list)
    for file in sorted(folder.proof.glob(f"{kind}-*.npz")):
        with np.load(file, allow_pickle=False) as arrays:
            for name in arrays.files:
                tensors[name].append(arrays[name])
    if not tensors:
        raise ValueError(f"the run left no {kind} in {folder.proof}")
    return tensors


def _losses(run: RunFolder, reference: RunFolder) -> Difference:
    """|a - b| / |b| for each step; a loss that is not finite (null in the file) differs from every loss."""
    losses, reference_losses = (
        {line["step"]: line["loss"] for line in MetricsReader(folder.metrics).read()}
        for folder in (run, reference)
    )
    if losses.keys() != reference_losses.keys() or not losses:
        raise ValueError(f"the run logged {len(losses)} steps and one device {len(reference_losses)}")
    return _largest(
        (f"step {step}", math.inf if a is None or b is None else _relative(abs(a - b), abs(b)))
        for (step, a), b in zip(losses.items(), reference_losses.values(), strict=True)
    )


def _tensors(tensors: Tensors, reference: Tensors, *, least_norm: float = 0.0) -> Difference:
    """|a - b| / |b| by tensor norm; infinite if one side lacks the tensor or has another shape.

    If |b| is smaller than `least_norm`, the difference is divided by `least_norm`.
    """

    def of(name: str) -> float:
        pairs = product(tensors.get(name, ()), reference.get(name, ()))
        return max((_norm_difference(a, b, least_norm=least_norm) for a, b in pairs), default=math.inf)

    return _largest((name, of(name)) for name in sorted({*tensors, *reference}))


def _largest(differences: Iterable[tuple[str, float]]) -> Difference:
    where, value = max(differences, key=lambda item: item[1])
    return Difference(value, where)


def _norm_difference(a: NDArray[Any], b: NDArray[Any], *, least_norm: float) -> float:
    if a.shape != b.shape:
        return math.inf
    a, b = a.astype(np.float64), b.astype(np.float64)
    return _relative(_norm(a - b), max(_norm(b), least_norm))


def _norm(array: NDArray[Any]) -> float:
    return float(np.linalg.norm(array.astype(np.float64)))


def _relative(difference: float, norm: float) -> float:
    if not (math.isfinite(difference) and math.isfinite(norm)):
        return math.inf
    if difference == 0:
        return 0.0
    return difference / norm if norm else math.inf
