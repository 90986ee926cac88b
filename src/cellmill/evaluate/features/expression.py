"""Helpers for tasks that predict expression.

They are correlations of genes, penalties of a ridge regression, and the expected logarithm of counts.
"""

import numpy as np

from cellmill.data.arrays import TARGET_SUM, divide

# penalties of a ridge regression to choose from, by the smallest leave-one-out error
ALPHAS = np.logspace(-2, 4, 13)
# From this expected count on, the logarithm of the expected count is used. It differs from the expected
# logarithm by at most 0.02.
LARGE_COUNT = 30.0
ROUNDING = 1e-9  # a column with a smaller length after centring is constant


def column_correlations(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Pearson correlation of each column of `first` with the same column of `second`, (columns,) float64.

    Both arrays are (rows, columns) float64. The correlation is NaN if the column is constant in either.
    """
    x = first - first.mean(0)
    y = second - second.mean(0)
    x_length = np.linalg.norm(x, axis=0)
    y_length = np.linalg.norm(y, axis=0)
    both_vary = _varies(first, x_length) & _varies(second, y_length)
    lengths = np.where(both_vary, x_length * y_length, 0)
    return divide((x * y).sum(0), lengths)


def _varies(values: np.ndarray, centred_length: np.ndarray) -> np.ndarray:
    """Mark the columns that vary, (columns,) bool.

    `centred_length` is the length of each column after its mean was subtracted. Rounding errors give a
    constant column a length above 0, so the length is compared with the largest value of the column.
    """
    is_varying: np.ndarray = centred_length > ROUNDING * np.abs(values).max(0)
    return is_varying


def cross_correlations(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Pearson correlation of each column of `first` with each column of `second`.

    `first` is (rows, m), `second` is (rows, k), and the result is (m, k) float64. A constant column has
    correlation 0, because a NaN would break a ranking.
    """
    return np.asarray(_standardise(first).T @ _standardise(second))


def _standardise(values: np.ndarray) -> np.ndarray:
    """Centre columns and scale them to length 1; a constant column becomes zeros."""
    centred = values.astype(np.float64) - values.mean(0, dtype=np.float64)
    length = np.linalg.norm(centred, axis=0)
    return np.divide(centred, length, out=np.zeros_like(centred), where=length > ROUNDING)


def expected_log_expression(shares: np.ndarray, depth: np.ndarray) -> np.ndarray:
    """Expected log(1 + counts per 10,000) of genes with Poisson counts, (cells, genes) float64.

    The count of a gene has the mean depth * share. `shares` are (cells, genes), `depth` is (cells,). The
    expectation is a sum over all counts, because the expected logarithm is not the logarithm of the
    expected count.
    """
    mean = depth[:, None] * shares
    scale = TARGET_SUM / np.maximum(depth, 1)[:, None]
    summed_mean = np.minimum(mean, LARGE_COUNT)
    # sum over counts up to 8 standard deviations above the mean; larger counts add nothing
    largest = summed_mean.max(initial=0)
    n_counts = int(np.ceil(largest + 8 * largest**0.5)) + 5
    probability = np.exp(-summed_mean)  # Poisson probability of a count of 0
    expectation = np.zeros_like(mean)
    for count in range(1, n_counts + 1):
        probability = probability * summed_mean / count
        expectation += probability * np.log1p(count * scale)
    return np.where(mean < LARGE_COUNT, expectation, np.log1p(mean * scale))
