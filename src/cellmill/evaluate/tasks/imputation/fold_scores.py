"""Scores of predicted expression: correlations by gene and by cell, and squared errors.

Scores are computed within one fold. Otherwise differences between folds, such as donors with more
expression, would count as correlation.

Legend: C cells, G hidden genes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from scipy.stats import rankdata

from cellmill.data.arrays import divide
from cellmill.evaluate.features.expression import column_correlations
from cellmill.evaluate.methods import ByMethod
from cellmill.evaluate.scores import ScoreColumn
from cellmill.runs.results import ScoredMethod

# names of the metrics in words, by their headings in tables; a lower score is better for MSE only
METRICS: Mapping[str, str] = {
    "Pearson by gene": "Pearson of a gene over cells",
    "Spearman by gene": "Spearman of a gene over cells",
    "Pearson by cell": "Pearson of a cell over genes",
    "Spearman by cell": "Spearman of a cell over genes",
    "MSE": "mean squared error",
}


@dataclass(frozen=True)
class FoldPrediction:
    """Expression of hidden genes in the tested cells of one fold, predicted by one method."""

    method: ScoredMethod
    repetition: int  # the repetition that the fold belongs to
    n_repetitions: int
    cells: np.ndarray  # indices of the tested cells among the scored cells
    values: np.ndarray  # (tested cells, G)


def make_columns(predictions: Iterable[FoldPrediction], true: np.ndarray) -> list[ScoreColumn]:
    """A column for each metric, with the scores of all methods that have this metric.

    Metrics by gene have a score for each gene, and the other metrics a score for each cell. A score is the
    mean over the folds of a repetition. `true`, (C, G), is the measured expression of all scored cells.
    """
    n_cells, n_genes = true.shape
    # sums of scores and numbers of scores, (2, repetitions, genes or cells), by metric and method
    totals: dict[str, ByMethod] = {metric: {} for metric in METRICS}
    for prediction in predictions:
        scores = score_expression(prediction.values, true[prediction.cells])
        for metric, unit_scores in scores.items():
            units = prediction.cells
            n_units = n_cells
            if metric.endswith("by gene"):
                units = np.arange(n_genes)
                n_units = n_genes
            zeros = np.zeros((2, prediction.n_repetitions, n_units))
            total = totals[metric].setdefault(prediction.method, zeros)
            total[0, prediction.repetition, units] += np.nan_to_num(unit_scores)
            total[1, prediction.repetition, units] += np.isfinite(unit_scores)

    columns = []
    for metric, metric_name in METRICS.items():
        means = {}
        for method, (sums, n_scores) in totals[metric].items():
            if n_scores.any():
                means[method] = divide(sums, n_scores)
        if means:
            is_error = metric == "MSE"
            columns.append(ScoreColumn(metric, metric_name, means, lower_is_better=is_error))
    return columns


def score_expression(predicted: np.ndarray, true: np.ndarray) -> dict[str, np.ndarray]:
    """Scores of predicted expression, (C, G), by metric: (G,) float64 for the metrics by gene, and (C,)
    float64 for the other metrics. A correlation is NaN if the predicted or the true values are constant.
    """
    predicted = predicted.astype(np.float64)
    true = true.astype(np.float64)
    rank_in_gene = rankdata(predicted, axis=0)
    rank_in_cell = rankdata(predicted, axis=1)
    return {
        "Pearson by gene": column_correlations(predicted, true),
        "Spearman by gene": column_correlations(rank_in_gene, rankdata(true, axis=0)),
        "Pearson by cell": column_correlations(predicted.T, true.T),
        "Spearman by cell": column_correlations(rank_in_cell.T, rankdata(true, axis=1).T),
        "MSE": np.square(predicted - true).mean(1),
    }
