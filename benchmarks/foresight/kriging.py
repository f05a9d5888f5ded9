"""Problem: which few plans are worth a measurement, and what do they tell of all the others?

A model errs alike in alike plans. The logarithm of the seconds of row i is believed to be Gaussian around
what the model predicts, m_i, with

    K_ij = s_i s_j exp(-sum_d |x_id - x_jd| / l_d)         x: logarithms of dimensions, l: lengths, s: spread
    row j is measured as y:    k = K_j / (K_jj + n^2),    m <- m + k (y - m_j),    K <- K - k K_j'
    of a choice, b with the least m is taken; where i is faster after all, that is expected to lose
        E_i = v phi(z) - d Phi(-z),    d = m_i - m_b,    v^2 = K_ii + K_bb - 2 K_ib,    z = d / v
    next is the row j with the largest    sum over choices of max_i E_i / v^2 (K_ij - K_bj)^2 / (K_jj + n^2):
        expected loss, times the share of the doubt about it that measuring j removes

So rows are measured where a choice is close and doubtful, and what they say counts most nearby. Only the
strongest rival of a choice counts: a sum over all, whose losses are not independent, favours long choices.

Source: Krige (1951), as Gaussian processes in Rasmussen, Williams, "Gaussian Processes for Machine Learning"
(2006), ch. 2; expected improvement: Jones, Schonlau, Welch, J. Global Optimization 13 (1998); measuring for a
choice under correlated beliefs: Frazier, Powell, Dayanik, INFORMS J. Computing 21 (2009). Symbols: m -> mean,
K -> covariance, n -> noise, s -> spread, l -> lengths. Deviations: the share of removed variance stands for
the change of the expected loss itself, which has no closed form; rows of no choice count a little (REST), so
that a file without choices is calibrated too. Complexity: O(count x rows^2). Oracle:
tests/benchmarks/test_kriging.py, the posterior by one solve and losses by sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import erf, pi, sqrt

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
REST = 0.01  # weight of a row's own variance beside expected losses


def covariance(points: Array, lengths: Sequence[float], spread: Array) -> Array:
    """[rows, rows], of [rows, dimensions], a length for each dimension and [rows] of standard deviations."""
    apart = sum(np.abs(np.subtract.outer(x, x)) / length for x, length in zip(points.T, lengths, strict=True))
    return np.outer(spread, spread) * np.exp(-apart)


def krige(
    mean: Array,
    covariance: Array,
    choices: Sequence[Sequence[int]],
    measure: Callable[[int], float],
    count: int,
    noise: float,
) -> tuple[Array, list[int]]:
    """The mean after `measure` was asked for `count` rows (not more than there are), and which, in order.

    mean, covariance  of the logarithms of seconds, [rows] and [rows, rows]; `measure` gives such a logarithm
    choices           rows of which one, predicted fastest, will be taken
    noise             standard deviation of a measurement, > 0
    """
    seen: list[int] = []
    for _ in range(min(count, len(mean))):
        worth = _worth(mean, covariance, choices) / (np.diag(covariance) + noise**2)
        worth[seen] = -np.inf
        row = int(np.argmax(worth))
        gain = covariance[row] / (covariance[row, row] + noise**2)
        mean = mean + gain * (measure(row) - mean[row])
        covariance = covariance - np.outer(gain, covariance[row])
        seen.append(row)
    return mean, seen


def expected_loss(ahead: Array, spread: Array) -> Array:
    """E max(0, -x) of Gaussians with mean `ahead` and standard deviation `spread`, both [rows]."""
    z = ahead / spread
    behind = np.array([(1 - erf(each / sqrt(2))) / 2 for each in z])
    return spread * np.exp(-z * z / 2) / sqrt(2 * pi) - ahead * behind


def _worth(mean: Array, covariance: Array, choices: Sequence[Sequence[int]]) -> Array:
    """Of measuring each row, but for the division by its own variance."""
    worth = REST * (covariance**2).sum(axis=0)
    for rows in map(np.asarray, choices):
        best = rows[np.argmin(mean[rows])]
        others = rows[rows != best]
        between = covariance[others] - covariance[best]
        variance = between[range(len(others)), others] - between[:, best]
        variance = np.maximum(variance, np.finfo(float).tiny)
        loss = expected_loss(mean[others] - mean[best], np.sqrt(variance))
        told = (np.maximum(loss, 0.0) / variance)[:, None] * between**2
        worth += told.max(axis=0, initial=0.0)
    return worth
