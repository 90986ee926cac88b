"""Paired differences between the scores of two methods, with 95 % intervals.

Scores are `(repetitions, units)`, NaN for units that a repetition does not test. Units are cells, or
what a task scores in their place, such as genes or perturbations. Repetitions differ in the seeds of
folds, the draws of fitted cells or of what degraded cells keep, or the donors left out.

The tested units and the repetitions vary, as in a crossed design. The variance of the mean
difference is the sum of both parts, each from its own clusters (two-way clustering: Cameron,
Gelbach & Miller 2011, J. Bus. Econ. Stat. 29:238). The part common to both is not subtracted, so
intervals are too wide rather than too narrow. The quantile is Student's with Satterthwaite's
degrees of freedom. Units of different folds count as independent (Bayle, Bayle, Janson & Mackey
2020, "Cross-validation confidence intervals for test error"). The interval does not cover other
pretraining seeds, fitted cells, donors or batches; other donors are covered only where the
repetitions are left-out donors.

The share p of a gap that a method closes is a ratio of two such differences. Its interval is the
one of the linear combination score - p * ceiling - (1 - p) * trivial over the same units and
repetitions, divided by the gap (delta method).
"""

from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

LEVEL = 0.95  # confidence level of the intervals
MIN_VARIANCE = 1e-20  # below it the methods differ by the same in every unit


class Estimate(NamedTuple):
    """Mean of paired differences with its 95 % interval."""

    mean: float
    low: float
    high: float
    units_se: float  # standard error over units only


class ClosedShare(NamedTuple):
    """Share of a gap that a method closes, with its 95 % interval."""

    share: float
    low: float
    high: float


def paired_difference(scores: np.ndarray, other_scores: np.ndarray) -> Estimate:
    """Mean of `scores` minus `other_scores`, both `(repetitions, units)`, by the same metric."""
    differences = scores - other_scores
    is_tested = np.isfinite(differences)
    mean = float(differences[is_tested].mean())
    # what each unit and repetition adds to the mean; units and repetitions are the clusters
    shares = np.where(is_tested, differences - mean, 0) / is_tested.sum()
    units_variance, n_units = _cluster_variance(shares.sum(0)[is_tested.any(0)])
    repetitions_variance, n_repetitions = _cluster_variance(shares.sum(1)[is_tested.any(1)])
    variance = units_variance + repetitions_variance
    if variance <= MIN_VARIANCE:
        return Estimate(mean, mean, mean, 0.0)
    # Satterthwaite's approximation
    by_cluster = ((units_variance, n_units), (repetitions_variance, n_repetitions))
    divisor = sum(of_cluster**2 / max(n - 1, 1) for of_cluster, n in by_cluster)
    degrees_of_freedom = variance**2 / divisor
    half_width = float(stdtrit(degrees_of_freedom, (1 + LEVEL) / 2) * variance**0.5)
    return Estimate(mean, mean - half_width, mean + half_width, units_variance**0.5)


def _cluster_variance(sums: np.ndarray) -> tuple[float, int]:
    """Variance from the sums of clusters, and the number of clusters; 0 with one cluster."""
    n = len(sums)
    variance = float(n / (n - 1) * (sums**2).sum()) if n > 1 else 0.0
    return variance, n


def share_closed(
    scores: np.ndarray, trivial: np.ndarray, ceiling: np.ndarray
) -> ClosedShare | None:
    """Share of the gap from `trivial` to `ceiling` that `scores` close, and its interval; None if the
    gap may be 0 or less.

    All are `(repetitions, units)`, by the same metric; a unit counts if all of them test it.
    """
    is_tested = np.isfinite(scores + trivial + ceiling)
    scores, trivial, ceiling = (
        np.where(is_tested, values, np.nan) for values in (scores, trivial, ceiling)
    )
    gap = paired_difference(ceiling, trivial)
    if gap.low <= 0:
        return None
    share = paired_difference(scores, trivial).mean / gap.mean
    # 0 on average; its interval is the one of the share, times the gap
    rest = paired_difference(scores - trivial, share * (ceiling - trivial))
    return ClosedShare(share, share + rest.low / gap.mean, share + rest.high / gap.mean)
