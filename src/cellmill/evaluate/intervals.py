"""Paired differences between the scores of two methods, with 95 % intervals.

Scores are `(repetitions, units)`. A unit that a repetition does not test has NaN. Units are cells, or
what a task scores instead of cells, such as genes or perturbations. Repetitions differ in the seeds of
folds, in the draws of fitted cells, in the counts that degraded cells keep, or in the left-out donors.

A mean difference varies with the tested units and with the repetitions, as in a crossed design. Its
variance is the sum of two parts. One part is computed with the units as clusters, the other one with the
repetitions as clusters (two-way clustering: Cameron, Gelbach & Miller 2011, J. Bus. Econ. Stat. 29:238).
The variance that both parts share is not subtracted, so intervals are too wide rather than too narrow.
The quantile is Student's, with Satterthwaite's degrees of freedom.

Units of different folds count as independent (Bayle, Bayle, Janson & Mackey 2020, "Cross-validation
confidence intervals for test error"). The interval does not say how other pretraining seeds, fitted
cells, donors or batches would change the difference. It covers other donors only if each repetition
leaves donors out.

A method closes a share p of a gap. p is a ratio of two such differences. Consider the linear combination
score - p * ceiling - (1 - p) * trivial over the same units and repetitions. The interval of p is the
interval of this combination, divided by the gap (delta method).
"""

from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

LEVEL = 0.95  # confidence level of the intervals
# up to this variance, which is a rounding error, two methods differ by the same amount in every unit
MIN_VARIANCE = 1e-20


class Estimate(NamedTuple):
    """Mean of paired differences with its 95 % interval, from `low` to `high`."""

    mean: float
    low: float
    high: float
    units_se: float  # standard error of the mean over units only, without repetitions


class ClosedShare(NamedTuple):
    """Share of a gap that a method closes, with its 95 % interval, from `low` to `high`."""

    share: float
    low: float
    high: float


def estimate_difference(scores: np.ndarray, other_scores: np.ndarray) -> Estimate:
    """Estimate the mean of `scores` minus `other_scores`.

    Both are `(repetitions, units)`, by the same metric. A unit counts if both methods have a score.
    """
    differences = scores - other_scores
    is_tested = np.isfinite(differences)
    mean = float(differences[is_tested].mean())
    # deviation that each score adds to the mean, (repetitions, units); it is summed over clusters
    shares = np.where(is_tested, differences - mean, 0) / is_tested.sum()
    units_variance, n_units = _cluster_variance(shares.sum(0)[is_tested.any(0)])
    repetitions_variance, n_repetitions = _cluster_variance(shares.sum(1)[is_tested.any(1)])
    variance = units_variance + repetitions_variance
    if variance <= MIN_VARIANCE:
        return Estimate(mean, mean, mean, 0.0)
    # degrees of freedom by Satterthwaite's approximation
    by_cluster = ((units_variance, n_units), (repetitions_variance, n_repetitions))
    divisor = sum(part**2 / max(n - 1, 1) for part, n in by_cluster)
    degrees_of_freedom = variance**2 / divisor
    half_width = float(stdtrit(degrees_of_freedom, (1 + LEVEL) / 2) * variance**0.5)
    return Estimate(mean, mean - half_width, mean + half_width, units_variance**0.5)


def _cluster_variance(sums: np.ndarray) -> tuple[float, int]:
    """Return the variance of a mean, and the number of clusters.

    `sums`, (clusters,), are the deviations of each cluster from the mean. A single cluster has variance 0.
    """
    n = len(sums)
    variance = float(n / (n - 1) * (sums**2).sum()) if n > 1 else 0.0
    return variance, n


def estimate_closed_share(
    scores: np.ndarray, trivial: np.ndarray, ceiling: np.ndarray
) -> ClosedShare | None:
    """Estimate the share of the gap from `trivial` to `ceiling` that `scores` close.

    All three are scores, `(repetitions, units)`, by the same metric. A unit counts if all three have a
    score. Returns None if the 95 % interval of the gap includes 0 or lies below 0.
    """
    is_tested = np.isfinite(scores + trivial + ceiling)
    scores, trivial, ceiling = (
        np.where(is_tested, values, np.nan) for values in (scores, trivial, ceiling)
    )
    gap = estimate_difference(ceiling, trivial)
    if gap.low <= 0:
        return None
    share = estimate_difference(scores, trivial).mean / gap.mean
    # this difference is 0 on average; divided by the gap, its interval is the interval of the share
    rest = estimate_difference(scores - trivial, share * (ceiling - trivial))
    return ClosedShare(share, share + rest.low / gap.mean, share + rest.high / gap.mean)
