"""Helpers for tasks that predict expression: correlations of genes, strengths of a ridge regression,
and the logarithm of expected counts.
"""

import numpy as np

from cellmill.data.arrays import TARGET_SUM, divide

# strengths of a ridge regression; the one with the least leave-one-out error is taken
ALPHAS = np.logspace(-2, 4, 13)
# expected counts from which the logarithm of the expectation is within 0.02 of the expected one
LARGE_COUNT = 30.0


def column_correlations(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """(m,) float64: Pearson of each column of `first` with the same column of `second`, both (n, m)
    float64; NaN if the column is constant in either.
    """
    x = first - first.mean(0)
    y = second - second.mean(0)
    x_length = np.linalg.norm(x, axis=0)
    y_length = np.linalg.norm(y, axis=0)
    both_vary = _varies(first, x_length) & _varies(second, y_length)
    lengths = np.where(both_vary, x_length * y_length, 0)
    return divide((x * y).sum(0), lengths)


def _varies(values: np.ndarray, centred_length: np.ndarray) -> np.ndarray:
    """(m,) bool: False for a constant column, whose length is of rounding errors, not 0."""
    is_varying: np.ndarray = centred_length > 1e-9 * np.abs(values).max(0)
    return is_varying


def cross_correlations(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """(m, k) float64: Pearson of each column of `first`, (n, m), with each column of `second`, (n,
    k); 0 if one of them is constant, because a NaN would break a ranking.
    """
    return np.asarray(_standardise(first).T @ _standardise(second))


def _standardise(values: np.ndarray) -> np.ndarray:
    """Centre columns and scale them to length 1; a constant column becomes zeros."""
    centred = values.astype(np.float64) - values.mean(0, dtype=np.float64)
    length = np.linalg.norm(centred, axis=0)
    return np.divide(centred, length, out=np.zeros_like(centred), where=length > 1e-9)


def expected_log_expression(shares: np.ndarray, depth: np.ndarray) -> np.ndarray:
    """(C, G) float64: mean of log(1 + k * 10,000 / depth) over Poisson counts k of mean depth *
    share.

    Summed over k, because the expectation of a logarithm is not the logarithm of the expectation.
    """
    mean = depth[:, None] * shares
    scale = TARGET_SUM / np.maximum(depth, 1)[:, None]
    summed_mean = np.minimum(mean, LARGE_COUNT)
    # sum over counts up to 8 standard deviations above the mean; the rest adds nothing
    largest = summed_mean.max(initial=0)
    n_counts = int(np.ceil(largest + 8 * largest**0.5)) + 5
    probability = np.exp(-summed_mean)  # Poisson probability of a count of 0
    expectation = np.zeros_like(mean)
    for count in range(1, n_counts + 1):
        probability = probability * summed_mean / count
        expectation += probability * np.log1p(count * scale)
    return np.where(mean < LARGE_COUNT, expectation, np.log1p(mean * scale))
