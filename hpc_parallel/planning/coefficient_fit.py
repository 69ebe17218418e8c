"""Fit the coefficients of a hardware file to measured times.

Each coefficient has an expected value. The fit minimises the sum of two parts: the squares of (relative error
of a time / `error`), linear above HUBER (Huber 1964), and the squares of (logarithm of a coefficient's change
/ tolerance). A coefficient that does not affect the times therefore keeps its expected value.

The method is Levenberg-Marquardt on logarithms (Marquardt 1963).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

ERROR, HUBER = 0.03, 1.0  # the relative error of a time; where outliers begin, in units of `error`
ROUNDS, TRIES, ENOUGH = 25, 8, 0.01
SLOPE_STEP = 1e-4
Vector = list[float]
Matrix = list[Vector]


@dataclass(frozen=True)
class Expected:
    """A value before the measurement, and the tolerance of its logarithm."""

    value: float
    tolerance: float


@dataclass(frozen=True)
class Fitted:
    """A fitted value. spread: the uncertainty of its logarithm, from the curvature of the sum."""

    value: float
    spread: float


def fit(
    expected: Mapping[str, Expected],
    *,
    measured_s: Sequence[float],
    planned_s: Callable[[Mapping[str, float]], Sequence[float]],
    error: float = ERROR,
) -> dict[str, Fitted]:
    """The fitted coefficients by name. planned_s: returns the planned times for given coefficients."""
    problem = _Problem(expected, measured_s, planned_s, error)
    point, curvature = problem.minimum()
    variances = [row[at] for at, row in enumerate(np.linalg.inv(curvature).tolist())]
    return {
        name: Fitted(math.exp(logarithm), math.sqrt(max(0.0, variance)))
        for name, logarithm, variance in zip(expected, point, variances, strict=True)
    }


class _Problem:
    """The sum that the fit minimises."""

    def __init__(
        self,
        expected: Mapping[str, Expected],
        measured_s: Sequence[float],
        planned_s: Callable[[Mapping[str, float]], Sequence[float]],
        error: float,
    ) -> None:
        self._names, self._measured_s, self._planned_s, self._error = (
            list(expected), measured_s, planned_s, error,
        )  # fmt: skip
        self._centre = [math.log(one.value) for one in expected.values()]
        self._weights = [1 / one.tolerance**2 for one in expected.values()]

    def minimum(self) -> tuple[Vector, Matrix]:
        """The logarithms of the coefficients at the minimum of the sum, and the curvature there."""
        point, damping = list(self._centre), 1.0
        residual = self._residuals(point)
        best = self._cost(residual, point)
        for _ in range(ROUNDS):
            curvature, gradient = self._model(point, residual)
            for _ in range(TRIES):
                trial = _minus(point, np.linalg.solve(_damped(curvature, damping), gradient).tolist())
                trial_residual = self._residuals(trial)
                cost = self._cost(trial_residual, trial)
                if cost < best:
                    break
                damping *= 4
            else:
                return point, curvature
            gain, point, residual, best, damping = best - cost, trial, trial_residual, cost, damping / 4
            if gain < ENOUGH:
                break
        return point, self._model(point, residual)[0]

    def _residuals(self, point: Vector) -> Vector:
        values = {name: math.exp(at) for name, at in zip(self._names, point, strict=True)}
        planned_s = self._planned_s(values)
        pairs = zip(planned_s, self._measured_s, strict=True)
        return [math.log(planned / measured) / self._error for planned, measured in pairs]

    def _cost(self, residual: Vector, point: Vector) -> float:
        robust = sum(r * r if abs(r) < HUBER else 2 * HUBER * abs(r) - HUBER**2 for r in residual)
        moved = zip(point, self._centre, self._weights, strict=True)
        return robust + sum(weight * (at - centre) ** 2 for at, centre, weight in moved)

    def _model(self, point: Vector, residual: Vector) -> tuple[Matrix, Vector]:
        """The curvature and the gradient of half the sum (iteratively reweighted least squares)."""
        slopes = [self._slope(point, residual, at) for at in range(len(point))]
        weights = [min(1.0, HUBER / max(abs(r), 1e-12)) for r in residual]
        curvature = [[_dot(one, other, weights) for other in slopes] for one in slopes]
        gradient = [_dot(slope, residual, weights) for slope in slopes]
        for at, weight in enumerate(self._weights):
            curvature[at][at] += weight
            gradient[at] += weight * (point[at] - self._centre[at])
        return curvature, gradient

    def _slope(self, point: Vector, residual: Vector, at: int) -> Vector:
        moved = [value + SLOPE_STEP * (number == at) for number, value in enumerate(point)]
        return [(new - old) / SLOPE_STEP for new, old in zip(self._residuals(moved), residual, strict=True)]


def _dot(one: Vector, other: Vector, weights: Vector) -> float:
    return sum(weight * a * b for weight, a, b in zip(weights, one, other, strict=True))


def _minus(one: Vector, other: Vector) -> Vector:
    return [a - b for a, b in zip(one, other, strict=True)]


def _damped(matrix: Matrix, damping: float) -> Matrix:
    return [[value * (1 + damping * (i == j)) for j, value in enumerate(row)] for i, row in enumerate(matrix)]
