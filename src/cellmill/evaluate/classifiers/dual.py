"""Logistic regression on sparse features Z, by weights of the cells (`newton.py`).

Coefficients are Zᵀa of weights a of the cells, so a fit needs only products with ZZᵀ. Those of features
as they are come from products that all fits share (`evaluate.products`). Standard deviations are of
the fitted cells, so each fit has a ZZᵀ of its own. A shared one K, scaled by all cells, stands in for it:
the fit adds the constants (ZZᵀ - K) a to the logits, computes them again from the weights that it
finds, and repeats this until they stay. Nothing of K is left in the result.
"""

from typing import Any

import numpy as np

from cellmill.evaluate.classifiers import newton
from cellmill.evaluate.classifiers.newton import Unwhitened
from cellmill.evaluate.products import SharedCells

MAX_ROUNDS = 12  # of the stand-in; then the products of the features themselves are used
LOGIT_TOLERANCE = 1e-3  # largest change of a logit by the last round


def fit_weights(
    features: Any, shared: SharedCells | None, is_scaled: bool, targets: np.ndarray
) -> np.ndarray:
    """Weights `(classes, cells)` of the `features`, divided by their scale if this `is_scaled`, and
    of a constant feature of 1.

    `features` are sparse, or dense if they are small. `targets` are one-hot, `(classes, cells)`.
    `shared` are the same cells without a scale.
    """
    n_classes, n = targets.shape
    penalty = (2 if n_classes == 2 else 1) / n

    def multiply(weights: np.ndarray) -> np.ndarray:
        coefficients = features.T @ weights.T.astype(features.dtype)
        constant = weights.sum(1, keepdims=True)
        return np.asarray((features @ coefficients).T + constant)

    exact = Unwhitened(multiply, penalty)
    is_dense = isinstance(features, np.ndarray)
    if n <= features.shape[1]:
        if shared is not None and not is_scaled:
            exact = _multiply_by(shared.products(shared), penalty)
        elif is_dense:
            exact = _multiply_by(features @ features.T, penalty)
    weights = None
    if shared is not None and is_scaled and not is_dense:
        stand_in = _multiply_by(shared.scaled_products(), penalty)
        weights = _replace_products(stand_in, exact, targets)
    if weights is None:
        weights = newton.minimise(exact, targets)
    return weights / penalty


def _multiply_by(products: np.ndarray, penalty: float) -> Unwhitened:
    """Features whose products are `products`, `(cells, cells)`, and a constant feature of 1."""
    products += 1
    return Unwhitened(lambda weights: weights.astype(products.dtype) @ products, penalty)


def _replace_products(
    stand_in: Unwhitened, exact: Unwhitened, targets: np.ndarray
) -> np.ndarray | None:
    """Weights at the optimum of the `exact` products; None if the rounds do not converge."""
    weights = newton.minimise(stand_in, targets)
    constants = np.zeros(targets.shape)
    for _ in range(MAX_ROUNDS):
        previous = constants
        constants = (exact.multiply(weights) - stand_in.multiply(weights)) / exact.penalty
        weights = newton.minimise(stand_in, targets, weights, constants)
        if np.abs(constants - previous).max() <= LOGIT_TOLERANCE:
            return weights
    return None
