"""Inexact Newton steps for logistic regression (Dembo, Eisenstat and Steihaug, SIAM J. Numer. Anal.
19, 1982), each found by conjugate gradients over whitened features.

Legend: n cells, features Z, their coefficients w and penalty λ (`compute_penalty`), CURVATURE c,
whitened features U, their coefficients v, dual coefficients a.

Whitening divides by R, where RᵀR = c ZᵀZ / n + λ would be the Hessian if each cell had the curvature c.
(The curvature of the softmax is at most 1/2: Böhning, Ann. Inst. Statist. Math. 44, 1992.)

- features: U = Z R⁻¹, so logits Zw are Uv with v = Rw
- penalty: λ |w|² = |v|² - c |Uv|² / n
- products of cells: UUᵀ = n / c (1 - λ (c ZZᵀ / n + λ)⁻¹)

With fewer cells than features, U is the Cholesky factor of UUᵀ instead, a smaller array. For centred
features, U has one more column, for the intercept. By the formula of the penalty, the value c^-½ of
this column leaves the intercept without one.

The gradient of the objective, for probabilities p and targets t, is Uᵀ(a + (p - t) / n - c Uv / n).

Every v is Uᵀa, where a has a value for each cell and class, so a step is one product of dual
coefficients with UUᵀ. A RIDGE on its diagonal, as if each cell had a small feature of its own, bounds
dual coefficients that change no logit.
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

CURVATURE = 0.07  # c, of a typical cell at the optimum
TOLERANCE = 1e-4  # largest derivative by a coefficient of whitened features
RIDGE = 1e-10  # relative to n / c, the largest value of UUᵀ
FORCING = 0.5  # a Newton step is exact enough when it leaves this share of the gradient's norm
MAX_STEPS = 100
ARMIJO = 1e-4  # a step must lower the objective by this share of what its slope promises
ROUNDING = 1e-12  # rise of the objective that may hide the descent of the last steps
MAX_KERNEL_CELLS = 2048  # cells of the largest UUᵀ that is stored if cells outnumber features


def compute_penalty(n_classes: int, n_cells: int) -> float:
    """The penalty λ that gives scikit-learn's optimum with C = 1.

    scikit-learn fits one logit b for two classes. As two logits ±b / 2, their penalty must be
    2 / n for the same penalty on b.
    """
    return (2 if n_classes == 2 else 1) / n_cells


def check_finite(values: np.ndarray | float) -> None:
    """Raise DataError unless all `values` are finite; they are computed from the features of all cells."""
    if not np.isfinite(values).all():
        raise DataError(
            "a classifier cannot be fitted: a feature of a cell is NaN or infinite; correct the counts or the "
            "vectors that it comes from"
        )


class DualVector:
    """A vector of the search, such as a step or a gradient: dual coefficients, and what they add to the
    logits, which is their product with UUᵀ.

    Both are `(classes, cells)` float64 views of one array `stacked`, `(2, classes, cells)`, so that
    one operation changes both.
    """

    def __init__(self, stacked: np.ndarray) -> None:
        self.stacked = stacked
        self.dual_coefs = stacked[0]
        self.logits = stacked[1]

    def add(self, other: "DualVector", factor: float) -> None:
        """Add `factor` times `other`, in place."""
        daxpy(other.stacked.ravel(), self.stacked.ravel(), a=factor)


Search = Generator[DualVector, None, Any]
"""A coroutine that searches, and leaves each product with UUᵀ to its caller, so that several searches can
share one product. It yields a vector whose dual coefficients are set, and goes on once the caller has
written its logits:

    for vector in search:
        vector.logits[:] = vector.dual_coefs @ UUᵀ

It returns what it finds: `search_optimum` dual coefficients, `_search_step` a DualVector.
"""


def run_search(
    search: Search, compute_logits: Callable[[np.ndarray, np.ndarray], None]
) -> np.ndarray:
    """The dual coefficients that `search`, one of `search_optimum`, finds: `(classes, cells)`.

    `compute_logits` takes dual coefficients, and the array to which it writes their logits.
    """
    while True:
        try:
            vector = next(search)
        except StopIteration as end:
            return np.asarray(end.value)
        compute_logits(vector.dual_coefs, vector.logits)


class Unwhitened:
    """No whitening: c is 0, so U = Z / √λ. Only products of cells are known, not U itself."""

    curvature = 0.0

    def has_converged(self, dual_coefs: np.ndarray, squared_norm: float) -> bool:
        """True if the norm of the gradient is at most TOLERANCE, so that no entry is above it."""
        return squared_norm <= TOLERANCE**2


@dataclass(frozen=True)
class Whitening:
    """Whitened features of the fitted cells."""

    # U, `(cells, features + 1)`, or `(cells, cells + 1)` with fewer cells; the last column is the intercept's
    whitened: np.ndarray
    # UUᵀ plus RIDGE, `(cells, cells)`; None where products with U are faster
    kernel: np.ndarray | None
    # dual coefficients `(classes, cells)` -> coefficients `(width, classes)`
    unwhiten: Callable[[np.ndarray], np.ndarray]
    curvature: ClassVar[float] = CURVATURE

    def compute_logits(self, dual_coefs: np.ndarray, out: np.ndarray) -> None:
        """Write the product of `dual_coefs` with UUᵀ to `out`, both `(classes, cells)`."""
        if self.kernel is not None:
            np.dot(dual_coefs, self.kernel, out=out)
            return
        np.dot(dual_coefs @ self.whitened, self.whitened.T, out=out)
        daxpy(dual_coefs.ravel(), out.ravel(), a=RIDGE * len(self.whitened) / CURVATURE)

    def has_converged(self, dual_coefs: np.ndarray, squared_norm: float) -> bool:
        """True if no entry of the gradient with these dual coefficients is above TOLERANCE."""
        # with a norm above this bound, some entry is above TOLERANCE
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
    """Search for the dual coefficients at the optimum, `(classes, cells)`, for one-hot `targets` of the
    same shape. It begins at the dual coefficients `start`, and adds `offsets` to the logits. The
    logits do not have the `offsets` when the caller computes them.

    Warns by ConvergenceWarning if it stops before it converged.
    """
    n = targets.shape[1]
    curvature = whitening.curvature
    current = DualVector(np.zeros((2, *targets.shape)))
    if start is not None:
        current.dual_coefs[:] = start
        yield current
    objective, probabilities = _compute_objective(current, targets, offsets, curvature)
    for _ in range(MAX_STEPS):
        gradient = DualVector(np.empty_like(current.stacked))
        gradient.dual_coefs[:] = (probabilities - targets) / n - curvature / n * current.logits
        gradient.dual_coefs[:] += current.dual_coefs
        yield gradient
        squared_norm = float(np.vdot(gradient.dual_coefs, gradient.logits))
        check_finite(squared_norm)  # else no step would be short enough
        if whitening.has_converged(gradient.dual_coefs, squared_norm):
            break
        step = yield from _search_step(curvature, probabilities, gradient, squared_norm)
        slope = np.vdot(gradient.logits, step.dual_coefs)
        # halve the step until the objective falls by enough
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
    """Mean cross-entropy plus half the penalty at `point`, and the probabilities, `(classes, cells)`."""
    n = targets.shape[1]
    logits = point.logits + offsets
    shifted = logits - logits.max(0)
    true_logits = np.vdot(shifted, targets)
    exponentials = np.exp(shifted)
    sums = exponentials.sum(0)
    cross_entropy = (np.log(sums).sum() - true_logits) / n
    penalty = np.vdot(point.dual_coefs, point.logits)
    penalty -= curvature / n * np.vdot(point.logits, point.logits)
    return cross_entropy + penalty / 2, exponentials / sums


def _search_step(
    curvature: float, probabilities: np.ndarray, gradient: DualVector, squared_norm: float
) -> Search:
    """Search for a Newton step, a DualVector, that leaves at most FORCING of the gradient's norm.

    `squared_norm` is the squared norm of the gradient over whitened features. Each conjugate direction
    is divided by the squared norm of its residual, so that the next one is this one plus residual /
    squared norm.
    """
    # Hessian: 1 over whitened features, plus diag(p / n) - p pᵀ / n - c / n over the logits, where p
    # are the probabilities of a cell
    n = probabilities.shape[1]
    shares = probabilities / n
    diagonal = shares - curvature / n
    residual = DualVector(-gradient.stacked)
    direction = DualVector(np.zeros_like(gradient.stacked))
    step = DualVector(np.zeros_like(gradient.stacked))
    hessian_direction = np.empty_like(diagonal)  # the Hessian times the direction
    outer_product = np.empty_like(diagonal)  # p pᵀ / n times the direction
    target_squared_norm = FORCING**2 * squared_norm
    while squared_norm > target_squared_norm:
        # the next conjugate direction
        direction.add(residual, 1 / squared_norm)
        # the Hessian times the direction
        np.multiply(probabilities, direction.logits, out=outer_product)
        np.multiply(shares, np.add.reduce(outer_product, 0), out=outer_product)
        np.multiply(diagonal, direction.logits, out=hessian_direction)
        hessian_direction -= outer_product
        hessian_direction += direction.dual_coefs
        # go to the minimum along it, and update the residual, whose logits the caller computes
        step_size = 1 / np.vdot(direction.logits, hessian_direction)
        step.add(direction, step_size)
        daxpy(hessian_direction.ravel(), residual.dual_coefs.ravel(), a=-step_size)
        yield residual
        squared_norm = float(np.vdot(residual.dual_coefs, residual.logits))
    return step


def whiten(features: np.ndarray, penalty: float) -> Whitening:
    """Whiten centred `features`, `(cells, width)`. Raises LinAlgError if their scales differ too much."""
    n, width = features.shape
    # c ZᵀZ / n + λ, the Hessian; c ZZᵀ / n + λ with fewer cells than features
    gram = features @ features.T if width > n else features.T @ features
    gram *= CURVATURE / n
    gram.flat[:: len(gram) + 1] += penalty
    factor = _cholesky(gram.T)
    if width > n:
        return _whiten_wide(features, factor, penalty)
    return _whiten_tall(features, factor)


def _whiten_wide(features: np.ndarray, factor: np.ndarray, penalty: float) -> Whitening:
    """Whiten fewer cells than features; `factor` is the Cholesky factor of c ZZᵀ / n + λ."""
    n = len(features)
    # UUᵀ = n / c (1 - λ inverse); dpotri returns the lower triangle of the inverse, and 0 above it
    scaled_inverse, _ = dpotri(factor, lower=True)
    scaled_inverse *= -penalty * n / CURVATURE
    kernel = scaled_inverse + scaled_inverse.T
    # this sum doubles the diagonal, so it is set; without RIDGE, UUᵀ of centred features is singular
    kernel.flat[:: n + 1] = scaled_inverse.diagonal() + (1 + RIDGE) * n / CURVATURE
    columns = np.empty((n, n + 1), order="F")
    columns[:, :n] = kernel.T
    columns[:, n] = CURVATURE**-0.5
    _cholesky(columns[:, :n])  # overwrites these columns by U
    kernel += 1 / CURVATURE  # the intercept's column times itself

    def unwhiten(dual_coefs: np.ndarray) -> np.ndarray:
        solved = dpotrs(factor, dual_coefs.T, lower=True)[0]
        return (solved.T @ features).T

    return Whitening(columns, kernel, unwhiten)


def _whiten_tall(features: np.ndarray, factor: np.ndarray) -> Whitening:
    """Whiten as many cells as features or more; `factor` is the Cholesky factor of c ZᵀZ / n + λ."""
    n, width = features.shape
    has_kernel = n <= min(2 * width, MAX_KERNEL_CELLS)
    columns = np.empty((n, width + 1), order="C" if has_kernel else "F")
    columns[:, :width] = dtrtrs(factor, features.T, lower=True)[0].T
    columns[:, width] = CURVATURE**-0.5
    kernel = None
    if has_kernel:
        kernel = columns @ columns.T
        kernel.flat[:: n + 1] += RIDGE * n / CURVATURE

    def unwhiten(dual_coefs: np.ndarray) -> np.ndarray:
        return np.asarray(dpotrs(factor, (dual_coefs @ features).T, lower=True)[0])

    return Whitening(columns, kernel, unwhiten)


def _cholesky(matrix: np.ndarray) -> np.ndarray:
    """Return the lower factor of a matrix in Fortran's order, which it overwrites.

    Only the lower triangle is read; the upper one becomes 0.
    """
    factor, failed = dpotrf(matrix, lower=True, overwrite_a=True)
    if failed:
        raise LinAlgError("not positive definite")
    return np.asarray(factor)
