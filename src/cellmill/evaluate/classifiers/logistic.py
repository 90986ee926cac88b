"""Multinomial logistic regression, with the optimum of scikit-learn's solvers, found sooner.

The objective is scikit-learn's with C = 1: the mean cross-entropy of n cells plus λ |w|² / 2, with
λ = 1 / n, or 2 / n for two classes, whose single logit there has half the penalty. `newton.py`
minimises it; scikit-learn fits what would not fit into memory there.
"""

import math
from contextlib import suppress
from typing import Any, NamedTuple, Self

import numpy as np
import scipy.sparse as sp
from scipy.linalg import LinAlgError
from sklearn import linear_model
from sklearn.utils.sparsefuncs import mean_variance_axis

from cellmill.evaluate.classifiers import newton
from cellmill.evaluate.classifiers.newton import CURVATURE, FORCING, RIDGE, TOLERANCE

# above these, scikit-learn fits: the smaller of cells and features, and all values (256 MiB)
MAX_SIDE = 2048
MAX_VALUES = 2**25


class Solution(NamedTuple):
    """Coefficients, `(width, classes)`, and intercepts, `(classes,)`."""

    coefficients: np.ndarray
    intercepts: np.ndarray


class LogisticRegression:
    """Fitted on features as they are or, if `standardised`, on those divided by their standard
    deviations.

    The intercept of dense features has no penalty, as in scikit-learn. Sparse ones are not centred,
    and their intercept has the penalty of a coefficient: large intercepts would decide on cells
    with fewer counts than the fitted cells. (scikit-learn's solvers stop before they reach such
    intercepts, but only at its default tolerance.)
    """

    def __init__(self, *, standardised: bool) -> None:
        self.standardised = standardised

    def __repr__(self) -> str:
        return f"LogisticRegression(standardised={self.standardised}, {CURVATURE=}, {TOLERANCE=}, {RIDGE=}, {FORCING=})"

    def fit(self, features: Any, labels: np.ndarray) -> Self:
        """Fit on `features`, `(cells, width)`, dense or sparse, and `labels`, `(cells,)`, of two
        classes or more.

        Warns by ConvergenceWarning if it stops before it converged.
        """
        self.classes, class_of_cell = np.unique(labels, return_inverse=True)
        shape = features.shape
        is_small = min(shape) <= MAX_SIDE and math.prod(shape) <= MAX_VALUES
        values = features.astype(np.float64)
        if sp.issparse(values):
            scale = self._choose_scale(*mean_variance_axis(values, axis=0))
            with_ones = _append_ones(values, scale, is_small)
            fitted = _minimise(with_ones, class_of_cell, is_small, has_intercept=False)
            # the last coefficient is the intercept
            self.coefficients = fitted.coefficients[:-1] / scale[:, None]
            self.intercepts = fitted.coefficients[-1]
        else:
            mean = values.mean(0)
            values -= mean
            variance = np.einsum("ij,ij->j", values, values) / len(values)
            scale = self._choose_scale(mean, variance)
            values /= scale
            fitted = _minimise(values, class_of_cell, is_small, has_intercept=True)
            # of the features as they are
            self.coefficients = fitted.coefficients / scale[:, None]
            self.intercepts = fitted.intercepts - mean @ self.coefficients
        return self

    def _choose_scale(self, mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
        """What features are divided by, `(width,)`: 1 for a constant feature, or without
        standardising.
        """
        is_scaled = self.standardised & (variance > 1e-20 * mean**2)
        return np.sqrt(np.where(is_scaled, variance, 1))

    def predict(self, features: Any) -> np.ndarray:
        """The class of highest probability of each cell, `(cells,)`, of features `(cells, width)`."""
        return self.classes[(features @ self.coefficients + self.intercepts).argmax(1)]


def _append_ones(values: sp.csr_matrix, scale: np.ndarray, is_small: bool) -> Any:
    """Features divided by their `scale` and a last column of ones; dense if `is_small`."""
    n, width = values.shape
    if is_small:
        dense = np.ones((n, width + 1))
        np.divide(values.toarray(), scale, out=dense[:, :width])
        return dense
    return sp.hstack([values @ sp.diags_array(1 / scale), np.ones((n, 1))], format="csr")


def _minimise(
    features: Any, class_of_cell: np.ndarray, is_small: bool, has_intercept: bool
) -> Solution:
    """The optimum for `features`, centred if it `has_intercept`; otherwise intercepts are 0."""
    n_classes = class_of_cell.max() + 1
    if is_small:
        with suppress(LinAlgError):  # raised if scales differ by more than about 1e4
            penalty = (2 if n_classes == 2 else 1) / len(features)
            whitening = newton.whiten(features, penalty, has_intercept)
            weights = newton.minimise(whitening, np.eye(n_classes)[:, class_of_cell])
            intercepts = weights.sum(1) * (has_intercept / CURVATURE)
            return Solution(whitening.unwhiten(weights), intercepts)
    model = linear_model.LogisticRegression(
        solver="newton-cg", max_iter=1000, fit_intercept=has_intercept
    )
    model.fit(features, class_of_cell)
    sign = [-0.5, 0.5] if n_classes == 2 else 1.0  # two classes have one logit
    return Solution(model.coef_.T * sign, model.intercept_ * sign)
