"""Multinomial logistic regression on few cells: the optimum of scikit-learn's solvers, sooner.

The objective is scikit-learn's with C = 1: the mean cross-entropy of n cells plus λ |w|² / 2, with λ = 1 / n, or 2 / n
for two classes, whose single logit there has half the penalty. Inexact Newton steps minimise it (Dembo, Eisenstat and
Steihaug, SIAM J. Numer. Anal. 19, 1982), each found by conjugate gradients over whitened features.

Whitened features are U = Z R⁻¹ of features Z, where RᵀR = c ZᵀZ / n + λ is the Hessian if each cell had the curvature
c; that of the softmax is at most 1/2 (Böhning, Ann. Inst. Statist. Math. 44, 1992). Over U the penalty λ |w|²
is |v|² - c |Uv|² / n, so that a step needs two products with U alone. For centred features, a column of c^-½ gets the
intercept as its coefficient, by the same formula without a penalty. With fewer cells than features, U is the Cholesky
factor of UUᵀ = n / c (1 - λ (c ZZᵀ / n + λ)⁻¹).
"""

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

import numpy as np
import scipy.sparse as sp
from scipy.linalg import LinAlgError
from scipy.linalg.blas import daxpy
from scipy.linalg.lapack import dpotrf, dpotri, dpotrs, dtrtrs
from sklearn import linear_model
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.sparsefuncs import mean_variance_axis

CURVATURE = 0.07  # c, of a typical cell at the optimum
TOLERANCE = 1e-4  # largest derivative by a coefficient of whitened features
FORCING = 0.5  # a Newton step is exact enough when it leaves this share of the gradient's norm
MAX_STEPS = 100
# larger features are left to scikit-learn: cells or features, whichever is less, and values (256 MiB)
MAX_SIDE, MAX_VALUES = 2048, 2**25


class LogisticRegression:
    """Fitted on features as they are or, if `standardised`, on those divided by their standard deviations.

    The intercept of dense features has no penalty, as in scikit-learn. Sparse ones are not centred, and their intercept
    has the penalty of a coefficient: large intercepts would decide on cells with fewer counts than the fitted ones.
    (scikit-learn's solvers stop before they reach such intercepts, but only at its default tolerance.)
    """

    def __init__(self, *, standardised: bool) -> None:
        self.standardised = standardised

    def __repr__(self) -> str:
        return f"LogisticRegression(standardised={self.standardised}, {CURVATURE=}, {TOLERANCE=}, {FORCING=})"

    def fit(self, features: Any, labels: np.ndarray) -> Self:
        """Fit on `features`, `(cells, width)`, dense or sparse, and `labels`, `(cells,)`, of two classes or more.

        Warns by ConvergenceWarning where it stops before it converged.
        """
        centred, (n, width) = not sp.issparse(features), features.shape
        small = min(n, width) <= MAX_SIDE and n * width <= MAX_VALUES
        values, mean, scale = features.astype(np.float64), np.zeros(width), np.ones(width)
        if centred:
            mean = values.mean(0)
            values -= mean
        if self.standardised:
            if centred:
                around, variance = mean, np.einsum("ij,ij->j", values, values) / n
            else:
                around, variance = mean_variance_axis(values, axis=0)
            variance[variance <= 1e-20 * around**2] = 1  # of a constant feature
            scale = np.sqrt(variance)
        if centred:
            values /= scale
        elif small:
            values = np.hstack([values.toarray() / scale, np.ones((n, 1))])
        else:
            values = sp.hstack([values @ sp.diags_array(1 / scale), np.ones((n, 1))], format="csr")
        self.classes, of_cell = np.unique(labels, return_inverse=True)
        coefficients, intercepts = _fit(values, of_cell, len(self.classes), small, intercept=centred)
        self.coefficients = coefficients[:width] / scale[:, None]
        self.intercepts = intercepts - mean @ self.coefficients if centred else coefficients[width]
        return self

    def predict(self, features: Any) -> np.ndarray:
        """The class of highest probability of each cell, `(cells,)`, of features `(cells, width)`."""
        return self.classes[(features @ self.coefficients + self.intercepts).argmax(1)]


def _fit(
    features: Any, of_cell: np.ndarray, n_classes: int, small: bool, intercept: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients `(width, classes)`, and intercepts `(classes,)` of centred features, else zeros."""
    if small:
        with suppress(LinAlgError):  # where scales are more than about 1e4 apart
            whitened, unwhiten = _whiten(features, (2 if n_classes == 2 else 1) / len(features))
            columns = np.hstack([whitened, np.full((len(whitened), int(intercept)), CURVATURE**-0.5)])
            found = _minimise(columns, np.eye(n_classes)[:, of_cell]).T
            return unwhiten(found[: whitened.shape[1]]), CURVATURE**-0.5 * found[whitened.shape[1] :].sum(0)
    model = linear_model.LogisticRegression(solver="newton-cg", max_iter=1000, fit_intercept=intercept)
    found, intercepts = model.fit(features, of_cell).coef_.T, model.intercept_
    if n_classes == 2:  # one logit
        return found * [-0.5, 0.5], intercepts * [-0.5, 0.5]
    return found, intercepts


def _whiten(features: np.ndarray, penalty: float) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
    """U, and the function from coefficients `(columns of U, classes)` to those of the features."""
    n, width = features.shape
    if width > n:
        factor = _cholesky(_shifted(features @ features.T * (CURVATURE / n), penalty).T)
        inverse, _ = dpotri(factor, lower=True)  # its lower triangle
        # of centred features, it is singular: the shift is far below the tolerance
        root = _cholesky(_shifted(inverse * -penalty, 1 + 1e-10) * (n / CURVATURE))
        return root, lambda v: features.T @ dpotrs(factor, dtrtrs(root, v, lower=True, trans=True)[0], lower=True)[0]
    root = _cholesky(_shifted(features.T @ features * (CURVATURE / n), penalty).T)
    return dtrtrs(root, features.T, lower=True)[0].T, lambda v: dtrtrs(root, v, lower=True, trans=True)[0]


def _cholesky(matrix: np.ndarray) -> np.ndarray:
    """The lower factor of a matrix in Fortran's order, which is overwritten, by its lower triangle."""
    factor, failed = dpotrf(matrix, lower=True, overwrite_a=True)
    if failed:
        raise LinAlgError("not positive definite")
    return np.asarray(factor)


def _shifted(matrix: np.ndarray, diagonal: float) -> np.ndarray:
    matrix.flat[:: len(matrix) + 1] += diagonal
    return matrix


def _minimise(features: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Coefficients `(classes, columns)` of whitened features `(cells, columns)` and one-hot `(classes, cells)`."""
    n, share = len(features), CURVATURE / len(features)

    def loss(x: np.ndarray, logits: np.ndarray) -> tuple[float, np.ndarray]:
        """Objective, and probabilities `(classes, cells)`."""
        odds = logits - logits.max(0)
        value = -np.vdot(odds, targets)
        np.exp(odds, out=odds)
        sums = odds.sum(0)
        odds /= sums
        return (value + np.log(sums).sum()) / n + (np.vdot(x, x) - share * np.vdot(logits, logits)) / 2, odds

    x, logits = np.zeros((len(targets), features.shape[1])), np.zeros(targets.shape)
    value, probabilities = loss(x, logits)
    for _ in range(MAX_STEPS):
        gradient = ((probabilities - targets) / n - share * logits) @ features + x
        if np.abs(gradient).max() <= TOLERANCE:
            break
        step, along = _newton_step(features, probabilities, gradient)
        slope, length = np.vdot(gradient, step), 1.0
        while True:
            new, new_logits = x + length * step, logits + length * along
            new_value, probabilities = loss(new, new_logits)
            if new_value <= value + 1e-4 * length * slope + 1e-12:  # rounding may hide the descent of the last steps
                break
            length /= 2
        x, logits, value = new, new_logits, new_value
    else:
        warnings.warn(f"after {MAX_STEPS} steps", ConvergenceWarning, stacklevel=2)
    return x


def _newton_step(
    features: np.ndarray, probabilities: np.ndarray, gradient: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The step, in the shape of `gradient`, and what it adds to the logits, `(classes, cells)`.

    Works in place, on a direction and what it adds to the logits side by side: calls of numpy take the most time here.
    """
    size, weights = gradient.size, probabilities / len(features)
    own = weights - CURVATURE / len(features)
    both, moved = np.zeros((2, size + probabilities.size))
    direction, seen = both[:size].reshape(gradient.shape), both[size:].reshape(probabilities.shape)
    left, product, curved, shared = -gradient, np.empty_like(gradient), np.empty_like(own), np.empty_like(own)
    direction[:], norm = left, np.vdot(left, left)
    enough = FORCING**2 * norm
    while norm > enough:
        np.dot(direction, features.T, out=seen)
        np.multiply(probabilities, seen, out=shared)
        np.multiply(weights, np.add.reduce(shared, 0), out=shared)
        np.multiply(own, seen, out=curved)
        curved -= shared
        np.dot(curved, features, out=product)
        product += direction  # with the Hessian
        length = norm / np.vdot(direction, product)
        daxpy(both, moved, a=length)
        daxpy(product.ravel(), left.ravel(), a=-length)
        last, norm = norm, np.vdot(left, left)
        direction *= norm / last
        direction += left
    return moved[:size].reshape(gradient.shape), moved[size:].reshape(probabilities.shape)
