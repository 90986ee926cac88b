"""Logistic regression by inexact Newton steps.

A step is found by conjugate gradients over whitened features (Dembo, Eisenstat and Steihaug, SIAM J.
Numer. Anal. 19, 1982).

Legend: n cells, features Z, their coefficients w and penalty λ (`compute_penalty`), CURVATURE c,
whitened features U, their coefficients v, dual coefficients a.

Whitening makes the Hessian close to the identity, so that few steps are enough. If each cell had the
curvature c, the Hessian would be RᵀR = c ZᵀZ / n + λ. Features are divided by this R. (The curvature of
the softmax is at most 1/2: Böhning, Ann. Inst. Statist. Math. 44, 1992.) Then:

- The whitened features are U = Z R⁻¹, so the logits Zw are Uv with v = Rw.
- The penalty is λ |w|² = |v|² - c |Uv|² / n.
- The products of cells are UUᵀ = n / c (1 - λ (c ZZᵀ / n + λ)⁻¹).

With fewer cells than features, U is the Cholesky factor of UUᵀ instead, which is a smaller array. For
centred features, U has one more column, for the intercept. All values of this column are c^-½. With this
value, the formula above gives the intercept no penalty.

The gradient of the objective, for probabilities p and targets t, is Uᵀ(a + (p - t) / n - c Uv / n).

Every v is Uᵀa, where a has a value for each cell and class. So a step needs only one product of dual
coefficients with UUᵀ. Some dual coefficients change no logit, and could become large. A RIDGE on the
diagonal of UUᵀ keeps them small, as if each cell had a small feature of its own.
"""

import warnings
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from scipy.linalg import LinAlgError
from scipy.linalg.blas import daxpy
from scipy.linalg.lapack import dpotrf, dpotri, dpotrs, dtrtrs
from sklearn.exceptions import ConvergenceWarning

from cellmill.errors import DataError

CURVATURE = 0.07  # c: the curvature of a typical cell at the optimum
TOLERANCE = 1e-4  # at the optimum, a derivative by a coefficient of U is at most this
RIDGE = 1e-10  # added to the diagonal of UUᵀ, in units of n / c, the largest value of UUᵀ
# a Newton step is exact enough if it leaves at most this share of the gradient's norm
FORCING = 0.5
MAX_STEPS = 100  # at most this many Newton steps
ARMIJO = 1e-4  # a step must lower the objective by at least this share of what its slope promises
ROUNDING = 1e-12  # a rise of the objective by at most this may be a rounding error of a descent
MAX_KERNEL_CELLS = 2048  # with more cells than features, UUᵀ of at most this many cells is stored


def compute_penalty(n_classes: int, n_cells: int) -> float:
    """Return the penalty λ that gives the optimum of scikit-learn with C = 1.

    For two classes, scikit-learn fits a single logit b with the penalty 1 / n. Here the two classes have
    the logits ±b / 2, which need the penalty 2 / n for the same optimum.
    """
    return (2 if n_classes == 2 else 1) / n_cells


def check_finite(values: np.ndarray | float) -> None:
    """Raise DataError unless all `values` are finite. They are computed from the features of all cells."""
    if not np.isfinite(values).all():
        raise DataError(
            "a classifier cannot be fitted: a feature of a cell is NaN or infinite; correct the counts or the "
            "vectors that it comes from"
        )


class DualVector:
    """A vector of the search, such as a step or a gradient: dual coefficients, and their logits.

    The logits are the product of the dual coefficients with UUᵀ. Dual coefficients and logits are both
    `(classes, cells)` float64. They are views of one array `stacked`, `(2, classes, cells)`, so that one
    operation changes both.
    """

    def __init__(self, stacked: np.ndarray) -> None:
        self.stacked = stacked
        self.dual_coefs = stacked[0]
        self.logits = stacked[1]

    def add(self, other: "DualVector", factor: float) -> None:
        """Add `factor` times `other`, in place."""
        daxpy(other.stacked.ravel(), self.stacked.ravel(), a=factor)


Search = Generator[DualVector, None, Any]
"""A search that leaves each product with UUᵀ to its caller, so that several searches can share one product.

A search is a generator. It yields a vector with dual coefficients, and continues when the caller has
written the logits of the vector:

    for vector in search:
        vector.logits[:] = vector.dual_coefs @ UUᵀ

At its end it returns what it has found: `search_optimum` returns dual coefficients, and `_search_step`
returns a DualVector.
"""


def run_search(
    search: Search, compute_logits: Callable[[np.ndarray, np.ndarray], None]
) -> np.ndarray:
    """Run a `search` of `search_optimum` to its end, and return the dual coefficients, `(classes, cells)`.

    `compute_logits` takes dual coefficients and an array. It writes the logits into the array.
    """
    while True:
        try:
            vector = next(search)
        except StopIteration as end:
            return np.asarray(end.value)
        compute_logits(vector.dual_coefs, vector.logits)


class Unwhitened:
    """Features that are not whitened: c is 0, so U = Z / √λ.

    Only the products of cells are known, not U itself.
    """

    curvature = 0.0

    def has_converged(self, dual_coefs: np.ndarray, squared_norm: float) -> bool:
        """True if the norm of the gradient is at most TOLERANCE. Then no entry is above TOLERANCE."""
        return squared_norm <= TOLERANCE**2


@dataclass(frozen=True)
class Whitening:
    """Whitened features of the fitted cells."""

    # U, (cells, features + 1), or (cells, cells + 1) if there are fewer cells than features; the last
    # column is for the intercept
    whitened: np.ndarray
    # UUᵀ plus RIDGE, (cells, cells); None if products with U are faster
    kernel: np.ndarray | None
    # turns dual coefficients, (classes, cells), into coefficients of the features, (width, classes)
    unwhiten: Callable[[np.ndarray], np.ndarray]
    curvature: ClassVar[float] = CURVATURE

    def compute_logits(self, dual_coefs: np.ndarray, out: np.ndarray) -> None:
        """Write the product of `dual_coefs` with UUᵀ into `out`. Both are `(classes, cells)`."""
        if self.kernel is not None:
            np.dot(dual_coefs, self.kernel, out=out)
            return
        np.dot(dual_coefs @ self.whitened, self.whitened.T, out=out)
        daxpy(dual_coefs.ravel(), out.ravel(), a=RIDGE * len(self.whitened) / CURVATURE)

    def has_converged(self, dual_coefs: np.ndarray, squared_norm: float) -> bool:
        """True if no entry of the gradient is above TOLERANCE.

        `dual_coefs` are those of the gradient, and `squared_norm` is its squared norm.
        """
        # a gradient with a norm above this bound has an entry above TOLERANCE
        n_coefficients = len(dual_coefs) * self.whitened.shape[1]
        if squared_norm > n_coefficients * TOLERANCE**2:
            return False
        return bool(np.abs(dual_coefs @ self.whitened).max() <= TOLERANCE)


def search_optimum(
    whitening: Whitening | Unwhitened,
    targets: np.ndarray,
    start: np.ndarray | None = None,
    offsets: np.ndarray | float = 0.0,
) -> Search:
    """Search for the dual coefficients at the optimum, `(classes, cells)`.

    `targets`, `(classes, cells)`, are 1 for the class of a cell, else 0. The search begins at the dual
    coefficients `start`, or at 0. It adds `offsets` to the logits itself: the caller computes logits
    without them. A search that stops before it has converged warns with a ConvergenceWarning.
    """
    n_cells = targets.shape[1]
    curvature = whitening.curvature
    current = DualVector(np.zeros((2, *targets.shape)))
    if start is not None:
        current.dual_coefs[:] = start
        yield current
    objective, probabilities = _compute_objective(current, targets, offsets, curvature)
    for _ in range(MAX_STEPS):
        gradient = DualVector(np.empty_like(current.stacked))
        gradient.dual_coefs[:] = (probabilities - targets) / n_cells
        gradient.dual_coefs[:] -= curvature / n_cells * current.logits
        gradient.dual_coefs[:] += current.dual_coefs
        yield gradient
        squared_norm = float(np.vdot(gradient.dual_coefs, gradient.logits))
        check_finite(squared_norm)  # with NaN, no step would ever be short enough
        if whitening.has_converged(gradient.dual_coefs, squared_norm):
            break
        step = yield from _search_step(curvature, probabilities, gradient, squared_norm)
        slope = np.vdot(gradient.logits, step.dual_coefs)
        # halve the step until the objective falls by enough (Armijo's rule)
        step_size = 1.0
        while True:
            candidate = DualVector(current.stacked + step_size * step.stacked)
            new_objective, probabilities = _compute_objective(
                candidate, targets, offsets, curvature
            )
            if new_objective <= objective + ARMIJO * step_size * slope + ROUNDING:
                break
            step_size /= 2
        current = candidate
        objective = new_objective
    else:
        warnings.warn(f"after {MAX_STEPS} steps", ConvergenceWarning, stacklevel=2)
    return current.dual_coefs


def _compute_objective(
    point: DualVector, targets: np.ndarray, offsets: np.ndarray | float, curvature: float
) -> tuple[float, np.ndarray]:
    """Compute the objective and the probabilities, `(classes, cells)`, at `point`.

    The objective is the mean cross-entropy plus half the penalty λ |w|².
    """
    n_cells = targets.shape[1]
    logits = point.logits + offsets
    shifted = logits - logits.max(0)  # so that no exponential overflows
    true_logits = np.vdot(shifted, targets)
    exponentials = np.exp(shifted)
    sums = exponentials.sum(0)
    cross_entropy = (np.log(sums).sum() - true_logits) / n_cells
    penalty = np.vdot(point.dual_coefs, point.logits)
    penalty -= curvature / n_cells * np.vdot(point.logits, point.logits)
    return cross_entropy + penalty / 2, exponentials / sums


def _search_step(
    curvature: float, probabilities: np.ndarray, gradient: DualVector, squared_norm: float
) -> Search:
    """Search for a Newton step, a DualVector, that leaves at most FORCING of the gradient's norm.

    `squared_norm` is the squared norm of the gradient over whitened features. The search is by conjugate
    gradients. Each direction is divided by the squared norm of its residual. With this scale, the next
    direction is the last direction plus the new residual divided by its squared norm.
    """
    # The Hessian is the identity over whitened features, plus diag(p / n) - p pᵀ / n - c / n over the
    # logits of each cell, where p are the probabilities of the cell.
    n_cells = probabilities.shape[1]
    shares = probabilities / n_cells
    diagonal = shares - curvature / n_cells
    residual = DualVector(-gradient.stacked)
    direction = DualVector(np.zeros_like(gradient.stacked))
    step = DualVector(np.zeros_like(gradient.stacked))
    hessian_direction = np.empty_like(diagonal)  # the Hessian times the direction
    outer_product = np.empty_like(diagonal)  # p pᵀ / n times the direction
    target_squared_norm = FORCING**2 * squared_norm
    while squared_norm > target_squared_norm:
        # make the next conjugate direction
        direction.add(residual, 1 / squared_norm)
        # multiply it by the Hessian
        np.multiply(probabilities, direction.logits, out=outer_product)
        np.multiply(shares, np.add.reduce(outer_product, 0), out=outer_product)
        np.multiply(diagonal, direction.logits, out=hessian_direction)
        hessian_direction -= outer_product
        hessian_direction += direction.dual_coefs
        # go to the minimum along the direction, and update the residual; the caller computes its logits
        step_size = 1 / np.vdot(direction.logits, hessian_direction)
        step.add(direction, step_size)
        daxpy(hessian_direction.ravel(), residual.dual_coefs.ravel(), a=-step_size)
        yield residual
        squared_norm = float(np.vdot(residual.dual_coefs, residual.logits))
    return step


def whiten(features: np.ndarray, penalty: float) -> Whitening:
    """Whiten centred `features`, `(cells, width)`.

    Raises LinAlgError if the scales of the features differ too much.
    """
    n_cells, width = features.shape
    # the Hessian c ZᵀZ / n + λ, or c ZZᵀ / n + λ if there are fewer cells than features
    gram = features @ features.T if width > n_cells else features.T @ features
    gram *= CURVATURE / n_cells
    gram.flat[:: len(gram) + 1] += penalty
    factor = _cholesky(gram.T)
    if width > n_cells:
        return _whiten_wide(features, factor, penalty)
    return _whiten_tall(features, factor)


def _whiten_wide(features: np.ndarray, factor: np.ndarray, penalty: float) -> Whitening:
    """Whiten features of fewer cells than features.

    `factor` is the Cholesky factor of c ZZᵀ / n + λ.
    """
    n_cells = len(features)
    # UUᵀ is n / c (1 - λ inverse). dpotri returns the lower triangle of the inverse, and 0 above it.
    scaled_inverse, _ = dpotri(factor, lower=True)
    scaled_inverse *= -penalty * n_cells / CURVATURE
    kernel = scaled_inverse + scaled_inverse.T
    # The sum of both triangles doubles the diagonal, so the diagonal is set anew. Without RIDGE, UUᵀ of
    # centred features would be singular.
    kernel.flat[:: n_cells + 1] = scaled_inverse.diagonal() + (1 + RIDGE) * n_cells / CURVATURE
    columns = np.empty((n_cells, n_cells + 1), order="F")
    columns[:, :n_cells] = kernel.T
    columns[:, n_cells] = CURVATURE**-0.5
    _cholesky(columns[:, :n_cells])  # overwrites these columns with U
    kernel += 1 / CURVATURE  # adds the product of the intercept's column with itself

    def unwhiten(dual_coefs: np.ndarray) -> np.ndarray:
        solved = dpotrs(factor, dual_coefs.T, lower=True)[0]
        return (solved.T @ features).T

    return Whitening(columns, kernel, unwhiten)


def _whiten_tall(features: np.ndarray, factor: np.ndarray) -> Whitening:
    """Whiten features of at least as many cells as features.

    `factor` is the Cholesky factor of c ZᵀZ / n + λ.
    """
    n_cells, width = features.shape
    has_kernel = n_cells <= min(2 * width, MAX_KERNEL_CELLS)
    columns = np.empty((n_cells, width + 1), order="C" if has_kernel else "F")
    columns[:, :width] = dtrtrs(factor, features.T, lower=True)[0].T
    columns[:, width] = CURVATURE**-0.5
    kernel = None
    if has_kernel:
        kernel = columns @ columns.T
        kernel.flat[:: n_cells + 1] += RIDGE * n_cells / CURVATURE

    def unwhiten(dual_coefs: np.ndarray) -> np.ndarray:
        return np.asarray(dpotrs(factor, (dual_coefs @ features).T, lower=True)[0])

    return Whitening(columns, kernel, unwhiten)


def _cholesky(matrix: np.ndarray) -> np.ndarray:
    """Compute the lower Cholesky factor of a matrix in Fortran's order, and overwrite the matrix with it.

    Only the lower triangle is read. The upper triangle becomes 0. Raises LinAlgError if the matrix is not
    positive definite.
    """
    factor, failed = dpotrf(matrix, lower=True, overwrite_a=True)
    if failed:
        raise LinAlgError("not positive definite")
    return np.asarray(factor)
