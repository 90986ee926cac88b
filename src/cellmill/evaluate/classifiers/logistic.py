"""Multinomial logistic regression with the objective of scikit-learn, minimised in less time.

The objective is scikit-learn's with C = 1: the mean cross-entropy of n cells plus λ |w|² / 2, with λ
by `newton.compute_penalty`. For sparse features w includes the intercepts, so their optimum is not
scikit-learn's.

`newton.py` fits small dense features, scikit-learn other dense features, and `dual.fit_dual_coefs`
all sparse features.
"""

import math
from contextlib import suppress
from typing import Any, NamedTuple, Self

import numpy as np
import scipy.sparse as sp
from scipy.linalg import LinAlgError
from sklearn import linear_model

from cellmill.evaluate.classifiers import newton
from cellmill.evaluate.classifiers.dual import fit_dual_coefs
from cellmill.evaluate.features.products import SharedCells, compute_scale, divide_genes

# bounds of `is_small_problem`: the smaller dimension, and all values (256 MiB)
MAX_DENSE_SIDE = 2048
MAX_DENSE_VALUES = 2**25
# variance of a dense feature relative to its squared mean, below which it is constant: rounding
# errors of centred float64 values are below 1e-24
NO_CENTRED_VARIANCE = 1e-20


class Solution(NamedTuple):
    """Coefficients, `(width, classes)`, and intercepts, `(classes,)`."""

    coefficients: np.ndarray
    intercepts: np.ndarray


class LogisticRegression:
    """Fitted on features as they are or, if `standardised`, on those divided by their standard
    deviations.

    The intercept of dense features has no penalty, as in scikit-learn. Sparse features are not
    centred, and their intercept has the penalty of a coefficient: large intercepts would decide on cells
    with fewer counts than the fitted cells. (scikit-learn's solvers stop before they reach such
    intercepts, but only at its default tolerance.)
    """

    def __init__(self, *, standardised: bool) -> None:
        self.standardised = standardised

    def __repr__(self) -> str:
        """Part of the key of a cached prediction, which has the constants of the algorithm too."""
        return f"LogisticRegression(standardised={self.standardised})"

    def fit(self, features: Any, labels: np.ndarray) -> Self:
        """Fit on `features`, `(cells, width)`, dense or sparse, and `labels`, `(cells,)`, of two
        classes or more.

        Warns by ConvergenceWarning if it stops before it converged. Raises DataError for a feature that
        is not finite.
        """
        self.classes, class_of_cell = np.unique(labels, return_inverse=True)
        values = features.matrix if isinstance(features, SharedCells) else features
        is_small = is_small_problem(values.shape)
        if sp.issparse(values):
            scale = compute_scale(values) if self.standardised else np.ones(values.shape[1])
            divided: Any = divide_genes(values, scale)
            if is_small:
                divided = divided.toarray().astype(np.float64)
            targets = np.eye(len(self.classes))[:, class_of_cell]
            penalty = newton.compute_penalty(*targets.shape)
            scaled_duals = fit_dual_coefs(divided, targets) / penalty
            self.coefficients = divided.T @ scaled_duals.T / scale[:, None]
            self.intercepts = scaled_duals.sum(1)
        else:
            values = values.astype(np.float64)
            mean = values.mean(0)
            values -= mean
            variance = np.einsum("ij,ij->j", values, values) / len(values)
            newton.check_finite(variance)
            is_scaled = self.standardised & (variance > NO_CENTRED_VARIANCE * mean**2)
            scale = np.sqrt(np.where(is_scaled, variance, 1))
            values /= scale
            fitted = _fit_dense(values, class_of_cell, is_small)
            # coefficients of the unscaled features
            self.coefficients = fitted.coefficients / scale[:, None]
            self.intercepts = fitted.intercepts - mean @ self.coefficients
        return self

    def predict(self, features: Any) -> np.ndarray:
        """The class of highest probability of each cell, `(cells,)`, of features `(cells, width)`."""
        coefficients = self.coefficients
        if isinstance(features, SharedCells):
            features = features.matrix
            coefficients = coefficients.astype(features.dtype)  # or the features would be copied
        return self.classes[(features @ coefficients + self.intercepts).argmax(1)]


def is_small_problem(shape: tuple[int, int]) -> bool:
    """True if sparse features of this shape, `(cells, width)`, are fitted as a dense copy, and dense
    ones by `newton.py`.
    """
    return min(shape) <= MAX_DENSE_SIDE and math.prod(shape) <= MAX_DENSE_VALUES


def _fit_dense(features: np.ndarray, class_of_cell: np.ndarray, is_small: bool) -> Solution:
    """Fit to centred dense `features`: by `newton.py` if they are small, else by scikit-learn."""
    n_classes = class_of_cell.max() + 1
    if is_small:
        with suppress(LinAlgError):  # raised if scales differ by more than about 1e4
            penalty = newton.compute_penalty(n_classes, len(features))
            whitening = newton.whiten(features, penalty)
            search = newton.search_optimum(whitening, np.eye(n_classes)[:, class_of_cell])
            dual_coefs = newton.run_search(search, whitening.compute_logits)
            intercepts = dual_coefs.sum(1) / newton.CURVATURE
            return Solution(whitening.unwhiten(dual_coefs), intercepts)
    model = linear_model.LogisticRegression(solver="newton-cg", max_iter=1000)
    model.fit(features, class_of_cell)
    sign = [-0.5, 0.5] if n_classes == 2 else 1.0  # two classes have one logit
    return Solution(model.coef_.T * sign, model.intercept_ * sign)
