"""Scores of single cells, and paired differences of two methods with a 95 % interval.

Both methods classify the same cells in the same repetitions: seeds of the folds, draws of training cells or of what
cells lose. Two things vary, as in a crossed design: the cells that are classified, and the repetitions. The variance of
the mean difference is the sum of both parts, each from its own clusters (two-way clustering: Cameron, Gelbach & Miller
2011, J. Bus. Econ. Stat. 29:238); the part common to both is not taken off, which makes intervals too wide rather than
too narrow. The quantile is Student's with Satterthwaite's degrees of freedom. Cells of different folds count as
independent: given what the folds were trained on, the mean over all of them has a normal limit for stable classifiers
(Bayle, Bayle, Janson & Mackey 2020, "Cross-validation confidence intervals for test error"). Other pretraining seeds,
other training cells, donors and batches are not in the interval.

F1 is no mean over cells: its cells have their linear terms instead (infinitesimal jackknife, Efron 1981), which is
coarse for classes of a few cells.
"""

from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student

NOT_TESTED = -1
"""Predicted class of a cell that a repetition does not test."""
LEVEL = 0.95


@dataclass(frozen=True)
class Difference:
    mean: float
    low: float
    high: float
    cells_se: float
    """Standard error over cells alone, for the same cells in runs of several pretraining seeds."""


def cell_scores(metric: str, labels: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """Scores whose mean over the tested cells of a repetition is its accuracy, macro_f1 or weighted_f1.

    `labels`, `(cells,)`, and `predicted`, `(repetitions, cells)`, are class numbers. Returns float64 of the shape of
    `predicted`, NaN where a cell is not tested.
    """
    scores = np.full(predicted.shape, np.nan)
    for row, classes in zip(scores, predicted):
        tested = classes != NOT_TESTED
        seen, guessed = labels[tested], classes[tested]
        row[tested] = seen == guessed if metric == "accuracy" else _f1(seen, guessed, metric == "weighted_f1")
    return scores


def _f1(labels: np.ndarray, predicted: np.ndarray, weighted: bool) -> np.ndarray:
    """F1 plus its derivative by the weight of each cell, times the number of cells."""
    classes = np.union1d(labels, predicted)
    true, guessed = labels[:, None] == classes, predicted[:, None] == classes
    sizes = true.sum(0) + guessed.sum(0)
    f1 = 2 * (true & guessed).sum(0) / sizes
    share = true.mean(0) if weighted else np.full(len(classes), 1 / len(classes))
    hits = 2.0 * (true & guessed) - f1 * (true.astype(float) + guessed)
    terms = len(labels) * (hits / sizes) @ share + share @ f1
    return np.asarray(terms + true @ f1 - share @ f1 if weighted else terms)


def paired_difference(own: np.ndarray, other: np.ndarray) -> Difference:
    """Mean of `own` minus `other`, results of `cell_scores` of the same metric, with its interval."""
    differences = own - other
    tested = np.isfinite(differences)
    mean = float(differences[tested].mean())
    shares = np.where(tested, differences - mean, 0) / tested.sum()
    cells = _clustered(shares.sum(0)[tested.any(0)])
    repetitions = _clustered(shares.sum(1))
    variance = cells[0] + repetitions[0]
    if variance <= 1e-20:  # the methods differ by the same in every cell
        return Difference(mean, mean, mean, 0.0)
    freedom = variance**2 / sum(part**2 / max(n - 1, 1) for part, n in (cells, repetitions))
    half = float(student.ppf((1 + LEVEL) / 2, freedom) * variance**0.5)
    return Difference(mean, mean - half, mean + half, cells[0] ** 0.5)


def _clustered(sums: np.ndarray) -> tuple[float, int]:
    """Variance from the sums of clusters, and the number of clusters; 0 with one cluster."""
    n = len(sums)
    return (float(n / (n - 1) * (sums**2).sum()) if n > 1 else 0.0), n
