"""Fit the coefficients of a hardware file to measured times.

Each coefficient has an expected value. The fit minimises the sum of two parts: the squares of (relative error
of a time / `error`), linear above HUBER (Huber 1964), and the squares of (logarithm of a coefficient's change
/ tolerance). A coefficient that does not affect the times therefore keeps its expected value.

The method is Levenberg-Marquardt on logarithms (Marquardt 1963).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpc_parallel.planning.hardware import Hardware, coefficient, with_coefficients

ERROR, HUBER = 0.03, 1.0  # the relative error of a time; where outliers begin, in units of `error`
ROUNDS, TRIES, ENOUGH = 25, 8, 0.01
SLOPE_STEP = 1e-4
Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Fitted:
    """A fitted value. spread: the uncertainty of its logarithm, from the curvature of the sum."""

    value: float
    spread: float


def fit(
    start: Hardware,
    *,
    tolerances: Mapping[str, float],
    measured_s: Sequence[float],
    planned_s: Callable[[Hardware], Sequence[float]],
    error: float = ERROR,
) -> tuple[Hardware, dict[str, Fitted]]:
    """Returns `start` with fitted coefficients, and the coefficients by name.

    tolerances: coefficient -> the tolerance of its logarithm. planned_s: the planned times on a hardware.
    """
    problem = _Problem(start, tolerances, np.log(measured_s), planned_s, error)
    point, curvature = problem.minimum()
    spreads = np.sqrt(np.maximum(0.0, np.diag(np.linalg.inv(curvature))))
    pairs = zip(tolerances, np.exp(point).tolist(), spreads.tolist(), strict=True)
    return problem.hardware(point), {name: Fitted(value, spread) for name, value, spread in pairs}


@dataclass(frozen=True)
class _Problem:
    """The sum that the fit minimises. A point has the logarithms of the coefficients."""

    start: Hardware
    tolerances: Mapping[str, float]
    log_measured: Vector
    planned_s: Callable[[Hardware], Sequence[float]]
    error: float

    def hardware(self, point: Vector) -> Hardware:
        return with_coefficients(self.start, dict(zip(self.tolerances, np.exp(point).tolist(), strict=True)))

    def minimum(self) -> tuple[Vector, Vector]:
        """The point at the minimum of the sum, and the curvature there."""
        point, damping = self._centre, 1.0
        residual = self._residuals(point)
        best = self._cost(residual, point)
        for _ in range(ROUNDS):
            curvature, gradient = self._model(point, residual)
            for _ in range(TRIES):
                damped = curvature + damping * np.diag(np.diag(curvature))
                trial = point - np.linalg.solve(damped, gradient)
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

    @property
    def _centre(self) -> Vector:
        return np.log([coefficient(self.start, name) for name in self.tolerances])

    @property
    def _weights(self) -> Vector:
        return np.array(list(self.tolerances.values())) ** -2.0

    def _residuals(self, point: Vector) -> Vector:
        return (np.log(self.planned_s(self.hardware(point))) - self.log_measured) / self.error

    def _cost(self, residual: Vector, point: Vector) -> float:
        size = np.abs(residual)
        robust = np.where(size < HUBER, size**2, 2 * HUBER * size - HUBER**2).sum()
        return float(robust + self._weights @ (point - self._centre) ** 2)

    def _model(self, point: Vector, residual: Vector) -> tuple[Vector, Vector]:
        """The curvature and the gradient of half the sum (iteratively reweighted least squares)."""
        steps = SLOPE_STEP * np.eye(len(point))
        slopes = np.stack([self._residuals(point + step) - residual for step in steps]) / SLOPE_STEP
        weighted = slopes * np.minimum(1.0, HUBER / np.maximum(np.abs(residual), 1e-12))
        curvature = weighted @ slopes.T + np.diag(self._weights)
        return curvature, weighted @ residual + self._weights * (point - self._centre)
