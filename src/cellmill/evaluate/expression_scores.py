"""Scores of predicted expression: correlations of each gene over cells and of each cell over genes, and errors.

Legend: C cells, G genes.
"""

from collections.abc import Mapping

import numpy as np
from scipy.stats import rankdata

METRICS: Mapping[str, str] = {
    "Pearson by gene": "Pearson of a gene over cells",
    "Spearman by gene": "Spearman of a gene over cells",
    "Pearson by cell": "Pearson of a cell over genes",
    "Spearman by cell": "Spearman of a cell over genes",
    "MSE": "mean squared error",
}
"""Heading of each metric, and its name in words; of MSE alone, lower is better."""
BY_GENE = ("Pearson by gene", "Spearman by gene")
"""Metrics with one score a gene; the others have one a cell."""


def expression_scores(predicted: np.ndarray, seen: np.ndarray) -> dict[str, np.ndarray]:
    """Scores, (G,) or (C,) float64, of (C, G) each; a correlation with a constant is NaN."""
    predicted, seen = predicted.astype(np.float64), seen.astype(np.float64)
    return {
        "Pearson by gene": correlation(predicted, seen),
        "Spearman by gene": correlation(rankdata(predicted, axis=0), rankdata(seen, axis=0)),
        "Pearson by cell": correlation(predicted.T, seen.T),
        "Spearman by cell": correlation(rankdata(predicted, axis=1).T, rankdata(seen, axis=1).T),
        "MSE": np.square(predicted - seen).mean(1),
    }


def correlation(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Pearson of each column of two arrays, NaN where one is constant."""
    x, y = first - first.mean(0), second - second.mean(0)
    lengths = np.linalg.norm(x, axis=0), np.linalg.norm(y, axis=0)
    # columns of equal numbers have sums of rounding errors
    varies = (lengths[0] > 1e-9 * np.abs(first).max(0)) & (lengths[1] > 1e-9 * np.abs(second).max(0))
    return np.divide((x * y).sum(0), lengths[0] * lengths[1], out=np.full(x.shape[1], np.nan), where=varies)
