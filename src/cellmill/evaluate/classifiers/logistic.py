"""Multinomial logistic regression with the objective of scikit-learn, minimised in less time.

The objective is that of scikit-learn with C = 1: the mean cross-entropy of the cells plus λ |w|² / 2, for
coefficients w. `newton.compute_penalty` has λ. For sparse features, w includes the intercepts, so the
optimum differs from scikit-learn's.

There are three ways to fit. `newton.py` fits small dense features. scikit-learn fits large dense
features. `dual.fit_dual_coefs` fits all sparse features.
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

# A small problem has at most MAX_DENSE_SIDE cells or features, whichever is fewer, and at most
# MAX_DENSE_VALUES values (256 MiB of float64).
MAX_DENSE_SIDE = 2048
MAX_DENSE_VALUES = 2**25
# A dense feature is constant if its variance, divided by its squared mean, is at most this. Rounding
# errors of centred float64 values make it less than 1e-24.
NO_CENTRED_VARIANCE = 1e-20


class Solution(NamedTuple):
    """Optimum of a regression."""

    coefficients: np.ndarray  # (width, classes)
    intercepts: np.ndarray  # (classes,)


class LogisticRegression:
    """Logistic regression on unchanged features, or on standardised features.

    If `standardised`, each feature is divided by its standard deviation over the fitted cells.

    The intercepts of dense features have no penalty, as in scikit-learn. Sparse features are not centred,
    and their intercepts have the penalty of coefficients. Without a penalty, the intercepts would be large
    and would decide the class of cells with fewer counts than the fitted cells. (scikit-learn's solvers
    stop before they reach such intercepts, but only at its default tolerance.)
    """

    def __init__(self, *, standardised: bool) -> None:
        self.standardised = standardised

    def __repr__(self) -> str:
        """Text with all options, which is a part of the key of a cached prediction.

        The key also has the constants of the algorithm.
        """
        return f"LogisticRegression(standardised={self.standardised})"

    def fit(self, features: Any, labels: np.ndarray) -> Self:
        """Fit to `features`, `(cells, width)`, and `labels`, `(cells,)`, of two classes or more.

        Features are dense, sparse, or `SharedCells`. A fit that stops before it has converged warns with a
        ConvergenceWarning. Raises DataError for a feature that is not finite.
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
            # turn the coefficients of scaled, centred features into those of the features as given
            self.coefficients = fitted.coefficients / scale[:, None]
            self.intercepts = fitted.intercepts - mean @ self.coefficients
        return self

    def predict(self, features: Any) -> np.ndarray:
        """Predict the most probable class of each cell, `(cells,)`, from `features`, `(cells, width)`."""
        coefficients = self.coefficients
        if isinstance(features, SharedCells):
            features = features.matrix
            # with coefficients of another dtype, the product would copy the features
            coefficients = coefficients.astype(features.dtype)
        return self.classes[(features @ coefficients + self.intercepts).argmax(1)]


def is_small_problem(shape: tuple[int, int]) -> bool:
    """True if features of this shape, `(cells, width)`, are small.

    `newton.py` fits small dense features. Small sparse features are fitted as a dense copy.
    """
    return min(shape) <= MAX_DENSE_SIDE and math.prod(shape) <= MAX_DENSE_VALUES


def _fit_dense(features: np.ndarray, class_of_cell: np.ndarray, is_small: bool) -> Solution:
    """Fit to centred dense `features`: small ones by `newton.py`, other ones by scikit-learn.

    scikit-learn also fits small features if `newton.py` fails, because the scales of features differ by
    more than about 1e4.
    """
    n_classes = class_of_cell.max() + 1
    if is_small:
        with suppress(LinAlgError):
            penalty = newton.compute_penalty(n_classes, len(features))
            whitening = newton.whiten(features, penalty)
            search = newton.search_optimum(whitening, np.eye(n_classes)[:, class_of_cell])
            dual_coefs = newton.run_search(search, whitening.compute_logits)
            intercepts = dual_coefs.sum(1) / newton.CURVATURE
            return Solution(whitening.unwhiten(dual_coefs), intercepts)
    model = linear_model.LogisticRegression(solver="newton-cg", max_iter=1000)
    model.fit(features, class_of_cell)
    # scikit-learn has one logit for two classes, which is divided here into a logit for each class
    factors = [-0.5, 0.5] if n_classes == 2 else 1.0
    return Solution(model.coef_.T * factors, model.intercept_ * factors)
