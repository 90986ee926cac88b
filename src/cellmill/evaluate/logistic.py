"""Multinomial logistic regression, with the optimum of scikit-learn's solvers, found sooner.

The objective is scikit-learn's with C = 1: the mean cross-entropy of n cells plus λ |w|² / 2, with
λ = 1 / n, or 2 / n for two classes, whose single logit there has half the penalty. Inexact Newton
steps minimise it (Dembo, Eisenstat and Steihaug, SIAM J. Numer. Anal. 19, 1982), each found by
conjugate gradients over whitened features.

Whitened features are U = Z R⁻¹ of features Z, where RᵀR = c ZᵀZ / n + λ is the Hessian if each cell
had the curvature c; that of the softmax is at most 1/2 (Böhning, Ann. Inst. Statist. Math. 44,
1992). Over U the penalty λ |w|² is |v|² - c |Uv|² / n. For centred features, a column of c^-½ gets
the intercept as its coefficient, by the same formula without a penalty. With fewer cells than
features, U is the Cholesky factor of UUᵀ = n / c (1 - λ (c ZZᵀ / n + λ)⁻¹).

Every v is Uᵀa of weights a of the cells, and a step is one product of weights with UUᵀ. A RIDGE on
its diagonal, as if each cell had a small feature of its own, keeps weights bounded that change no
logit.
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
RIDGE = 1e-10  # relative to n / c, the largest value of UUᵀ
FORCING = 0.5  # a Newton step is exact enough when it leaves this share of the gradient's norm
MAX_STEPS = 100
# above these, scikit-learn fits: the smaller of cells and features, and all values (256 MiB)
MAX_SIDE = 2048
MAX_VALUES = 2**25


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
        centred = not sp.issparse(features)
        n, width = features.shape
        small = min(n, width) <= MAX_SIDE and n * width <= MAX_VALUES
        # centre dense features, then divide by the scale
        values = features.astype(np.float64)
        mean = np.zeros(width)
        scale = np.ones(width)
        if centred:
            mean = values.mean(0)
            values -= mean
        if self.standardised:
            if centred:
                center = mean
                variance = np.einsum("ij,ij->j", values, values) / n
            else:
                center, variance = mean_variance_axis(values, axis=0)
            variance[variance <= 1e-20 * center**2] = 1  # a constant feature keeps its values
            scale = np.sqrt(variance)
        if centred:
            values /= scale
        elif small:
            dense = np.ones((n, width + 1))  # the last column has the intercept as its coefficient
            np.divide(values.toarray(), scale, out=dense[:, :width])
            values = dense
        else:
            values = sp.hstack([values @ sp.diags_array(1 / scale), np.ones((n, 1))], format="csr")
        self.classes, class_of_cell = np.unique(labels, return_inverse=True)
        coefficients, intercepts = _fit(
            values, class_of_cell, len(self.classes), small, intercept=centred
        )
        # coefficients of the features as they are
        self.coefficients = coefficients[:width] / scale[:, None]
        self.intercepts = intercepts - mean @ self.coefficients if centred else coefficients[width]
        return self

    def predict(self, features: Any) -> np.ndarray:
        """The class of highest probability of each cell, `(cells,)`, of features `(cells, width)`."""
        return self.classes[(features @ self.coefficients + self.intercepts).argmax(1)]


def _fit(
    features: Any, class_of_cell: np.ndarray, n_classes: int, small: bool, intercept: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients `(width, classes)`, and intercepts `(classes,)` of centred features, else zeros."""
    if small:
        with suppress(LinAlgError):  # raised if scales differ by more than about 1e4
            penalty = (2 if n_classes == 2 else 1) / len(features)
            constant = np.full(int(intercept), CURVATURE**-0.5)
            whitened, kernel, unwhiten = _whiten(features, penalty, constant)
            targets = np.eye(n_classes)[:, class_of_cell]  # (classes, cells)
            weights = _minimise(whitened, kernel, targets)
            return unwhiten(weights), weights.sum(1) * (intercept / CURVATURE)
    model = linear_model.LogisticRegression(
        solver="newton-cg", max_iter=1000, fit_intercept=intercept
    )
    model.fit(features, class_of_cell)
    sign = [-0.5, 0.5] if n_classes == 2 else 1.0  # two classes have one logit
    return model.coef_.T * sign, model.intercept_ * sign


def _whiten(
    features: np.ndarray, penalty: float, constants: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None, Callable[[np.ndarray], np.ndarray]]:
    """U, followed by a column for each of `constants`; UUᵀ + RIDGE, or None where products with U
    are faster; and the function from weights of cells `(classes, cells)` to coefficients `(width,
    classes)`.
    """
    n, width = features.shape
    side = min(n, width)
    square = n <= min(2 * width, MAX_SIDE)
    columns = np.empty((n, side + len(constants)), order="C" if square and width <= n else "F")
    columns[:, side:] = constants
    whitened = columns[:, :side]
    # the Hessian c ZᵀZ / n + λ, or c ZZᵀ / n + λ with fewer cells than features
    gram = features @ features.T if width > n else features.T @ features
    gram *= CURVATURE / n
    gram.flat[:: side + 1] += penalty
    factor = _cholesky(gram.T)
    if width > n:
        inverse, _ = dpotri(factor, lower=True)  # zeros above the diagonal
        inverse *= -penalty * n / CURVATURE
        kernel = inverse + inverse.T
        # centred features would be singular without it
        kernel.flat[:: n + 1] = inverse.diagonal() + (1 + RIDGE) * n / CURVATURE
        whitened[:] = kernel.T
        _cholesky(whitened)
        kernel += constants @ constants

        def unwhiten_wide(weights: np.ndarray) -> np.ndarray:
            solved = dpotrs(factor, weights.T, lower=True)[0]
            return (solved.T @ features).T

        return columns, kernel, unwhiten_wide
    whitened[:] = dtrtrs(factor, features.T, lower=True)[0].T
    kernel = None
    if square:
        kernel = columns @ columns.T
        kernel.flat[:: n + 1] += RIDGE * n / CURVATURE

    def unwhiten(weights: np.ndarray) -> np.ndarray:
        return np.asarray(dpotrs(factor, (weights @ features).T, lower=True)[0])

    return columns, kernel, unwhiten


def _cholesky(matrix: np.ndarray) -> np.ndarray:
    """Return the lower factor of a matrix, of which only the lower triangle is read.

    The matrix is in Fortran's order and is overwritten.
    """
    factor, failed = dpotrf(matrix, lower=True, overwrite_a=True)
    if failed:
        raise LinAlgError("not positive definite")
    return np.asarray(factor)


def _minimise(whitened: np.ndarray, kernel: np.ndarray | None, targets: np.ndarray) -> np.ndarray:
    """Weights of the cells, `(classes, cells)`, by results of `_whiten` and one-hot `targets` of
    the same shape.

    Weights and what they add to the logits, their product with UUᵀ, are kept side by side: `(2,
    classes, cells)`.
    """
    n = len(whitened)
    curvature = CURVATURE / len(whitened)
    both = np.zeros((2, *targets.shape))  # weights and logits
    between = np.empty((len(targets), whitened.shape[1]))

    def multiply(weights: np.ndarray, out: np.ndarray) -> None:
        if kernel is not None:
            np.dot(weights, kernel, out=out)
        else:
            np.dot(np.dot(weights, whitened, out=between), whitened.T, out=out)
            daxpy(weights.ravel(), out.ravel(), a=RIDGE / curvature)

    def loss(weights: np.ndarray, logits: np.ndarray) -> tuple[float, np.ndarray]:
        """Objective, and probabilities `(classes, cells)`."""
        odds = logits - logits.max(0)
        value = -np.vdot(odds, targets)
        np.exp(odds, out=odds)
        sums = odds.sum(0)
        odds /= sums
        penalty = np.vdot(weights, logits) - curvature * np.vdot(logits, logits)
        return (value + np.log(sums).sum()) / n + penalty / 2, odds

    value, probabilities = loss(*both)
    for _ in range(MAX_STEPS):
        gradient = np.empty_like(both)
        gradient[0] = (probabilities - targets) / n - curvature * both[1] + both[0]
        multiply(*gradient)
        norm = float(np.vdot(*gradient))
        # with a norm above this bound, some derivative is above TOLERANCE
        if (
            norm <= between.size * TOLERANCE**2
            and np.abs(gradient[0] @ whitened).max() <= TOLERANCE
        ):
            break
        step = _newton_step(multiply, probabilities, gradient, norm)
        slope = np.vdot(gradient[1], step[0])
        # halve the step until the objective falls by enough
        length = 1.0
        while True:
            new = both + length * step
            new_value, probabilities = loss(*new)
            # rounding may hide the descent of the last steps
            if new_value <= value + 1e-4 * length * slope + 1e-12:
                break
            length /= 2
        both = new
        value = new_value
    else:
        warnings.warn(f"after {MAX_STEPS} steps", ConvergenceWarning, stacklevel=2)
    return np.asarray(both[0])


def _newton_step(
    multiply: Callable[[np.ndarray, np.ndarray], None],
    probabilities: np.ndarray,
    gradient: np.ndarray,
    norm: float,
) -> np.ndarray:
    """The step, in the shape of `gradient`, whose squared norm over whitened features is `norm`.

    Works in place, and on conjugate directions divided by their norms: calls of numpy take the most
    time here.
    """
    # the Hessian is 1 over whitened features plus diag(p / n) - p pᵀ / n - c / n over the logits
    shares = probabilities / probabilities.shape[1]
    diagonal = shares - CURVATURE / probabilities.shape[1]
    # weights of the cells and their product with UUᵀ, (2, classes, cells) each
    left = -gradient
    direction = np.zeros_like(gradient)
    step = np.zeros_like(gradient)
    residual = left[0]
    direction_logits = direction[1]
    curved = np.empty_like(diagonal)  # direction times the Hessian
    shared = np.empty_like(diagonal)
    flat_residual = residual.ravel()
    flat_image = left[1].ravel()
    flat_logits = direction_logits.ravel()
    flat_curved = curved.ravel()
    enough = FORCING**2 * norm
    while norm > enough:
        # the next conjugate direction
        daxpy(left.ravel(), direction.ravel(), a=1 / norm)
        # the Hessian times the direction
        np.multiply(probabilities, direction_logits, out=shared)
        np.multiply(shares, np.add.reduce(shared, 0), out=shared)
        np.multiply(diagonal, direction_logits, out=curved)
        curved -= shared
        curved += direction[0]
        # go to the minimum along it, and update the residual
        length = 1 / flat_logits.dot(flat_curved)
        daxpy(direction.ravel(), step.ravel(), a=length)
        daxpy(flat_curved, flat_residual, a=-length)
        multiply(residual, left[1])
        norm = flat_residual.dot(flat_image)
    return step
