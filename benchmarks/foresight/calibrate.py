"""Problem: which few multipliers make a cost model agree with a handful of measured runs?

    minimise over x:  sum_i huber(log(predicted_i(x) / measured_i) / noise)
                    + sum_j ((x_j - prior_j) / spread_j)^2

x are logarithms of positive multipliers, so that each stays positive and a spread is a ratio. The second
sum is a Gaussian prior: a multiplier that no row informs stays where it was, and ten rows cannot bend
eight numbers to their noise. Solved by Levenberg-Marquardt on iteratively reweighted residuals.

Source: Levenberg (1944), Marquardt (1963); Huber, Ann. Math. Statist. 35 (1964). Symbols: x -> logarithms,
J -> jacobian. Deviations: J by forward differences. Complexity: O(rounds x multipliers) predictions. Oracle:
tests/benchmarks/test_calibrate.py recovers known multipliers, with and without an outlier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
NOISE = 0.03
HUBER = 0.5
STEP = 1e-4


@final
@dataclass(frozen=True, slots=True)
class Fit:
    """The multipliers found, and the sum that they minimise."""

    multipliers: Vector
    cost: float


def fit(
    predict: Callable[[Vector], Vector],
    measured: Vector,
    prior: Vector,
    spread: Vector,
    noise: float = NOISE,
    rounds: int = 30,
) -> Fit:
    """Multipliers whose predictions of the measured rows (seconds, shape [rows]) are nearest.

    prior   [multipliers] > 0, where they are believed to be
    spread  [multipliers], by which ratio (as a logarithm) they may well differ; 0 keeps one fixed
    noise   by which ratio a row may well be off: its measurement, and what no multiplier explains
    """
    free = np.flatnonzero(spread > 0)
    start = np.log(prior[free])

    def residuals(x: Vector) -> Vector:
        """Of the rows in units of the noise, then of the prior."""
        full = prior.copy()
        full[free] = np.exp(x)
        rows = np.log(predict(full) / measured) / noise if len(measured) else np.zeros(0)
        return np.concatenate([rows, (x - start) / spread[free]])

    x, cost = _minimise(residuals, start, len(measured), rounds)
    found = prior.copy()
    found[free] = np.exp(x)
    return Fit(found, cost)


def _minimise(
    residuals: Callable[[Vector], Vector], start: Vector, rows: int, rounds: int
) -> tuple[Vector, float]:
    """Levenberg-Marquardt; the first `rows` residuals count by Huber."""
    x, r = start, residuals(start)
    cost, damping = _cost(r, rows), 1e-2
    for _ in range(rounds):
        jacobian = _jacobian(residuals, x, r)
        weights = _weights(r, rows)
        normal = jacobian.T @ (weights[:, None] * jacobian)
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), jacobian.T @ (weights * r))
        moved = x - np.clip(step, -1.0, 1.0)
        there = residuals(moved)
        better = _cost(there, rows)
        if better >= cost:
            damping *= 4
            if damping > 1e6:
                break
            continue
        done = cost - better < 1e-6 * (1 + cost)
        x, r, cost, damping = moved, there, better, damping / 3
        if done:
            break
    return x, cost


def _jacobian(residuals: Callable[[Vector], Vector], x: Vector, here: Vector) -> Vector:
    columns = []
    for j in range(len(x)):
        moved = x.copy()
        moved[j] += STEP
        columns.append((residuals(moved) - here) / STEP)
    return np.stack(columns, axis=1) if columns else np.zeros((len(here), 0))


def _weights(r: Vector, rows: int) -> Vector:
    weights = np.ones(len(r))
    weights[:rows] = np.minimum(1.0, HUBER / np.maximum(np.abs(r[:rows]), 1e-12))
    return weights


def _cost(r: Vector, rows: int) -> float:
    size = np.abs(r[:rows])
    huber = np.where(size <= HUBER, size**2, 2 * HUBER * size - HUBER**2)
    return float(huber.sum() + (r[rows:] ** 2).sum())
