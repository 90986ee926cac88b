"""Logistic regression on sparse features Z, by its dual coefficients.

Coefficients are Zᵀa / λ for dual coefficients a, one for each cell and class, so a fit needs only
products with ZZᵀ (`features.products`). `newton.py` searches for a. The fits of all folds take their
steps together: one product of ZZᵀ with the dual coefficients of all fits costs little more than with
the dual coefficients of one. Dual coefficients are 0 for cells that a fit does not read.

Standard deviations are computed over the fitted cells, so each fit has a ZZᵀ of its own. A shared
matrix K, scaled by all cells, stands in for it. From dual coefficients a fitted with K alone, each
round:

1. computes the constants (ZZᵀ - K) a / λ, which are what K leaves out of the logits;
2. fits the dual coefficients again, with these constants added to the logits;
3. ends the fit if no constant changed by more than CONSTANT_TOLERANCE since the last round.

The result does not depend on K.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cellmill.evaluate.classifiers import newton
from cellmill.evaluate.classifiers.newton import Search, Unwhitened
from cellmill.evaluate.features.products import CellProducts, compute_scales

MAX_ROUNDS = 12  # rounds with K, after which the fit is left to `fit_dual_coefs`
CONSTANT_TOLERANCE = 1e-3  # largest change of a constant by the last round
MAX_STACKED_CLASSES = 256  # classes of all fits that take steps together
ByFit = dict[int, np.ndarray]
"""An array of each fit, by the fit's number: dual coefficients, logits, or one value per gene."""


@dataclass(frozen=True)
class FoldFit:
    """A regression that reads some of the cells."""

    cells: np.ndarray  # indices of the fitted cells
    targets: np.ndarray  # one-hot, `(classes, fitted cells)`

    @property
    def penalty(self) -> float:
        return newton.compute_penalty(*self.targets.shape)


def fit_dual_coefs(features: Any, targets: np.ndarray) -> np.ndarray:
    """Fit to `features`, `(cells, width)`, and a constant feature of 1. Return the dual coefficients
    divided by λ, `(classes, cells)`: their product with the features is the coefficients.

    `features` are sparse, or dense if they are small. `targets` are one-hot, `(classes, cells)`.
    """
    n = targets.shape[1]
    penalty = newton.compute_penalty(*targets.shape)
    products = None
    if isinstance(features, np.ndarray) and n <= features.shape[1]:
        products = features @ features.T
        products += 1

    def compute_logits(dual_coefs: np.ndarray, out: np.ndarray) -> None:
        if products is None:
            coefficients = features.T @ dual_coefs.T.astype(features.dtype)
            constant = dual_coefs.sum(1, keepdims=True)
            np.divide((features @ coefficients).T + constant, penalty, out=out)
        else:
            np.divide(dual_coefs @ products, penalty, out=out)

    search = newton.search_optimum(Unwhitened(), targets)
    return newton.run_search(search, compute_logits) / penalty


def fit_folds(products: CellProducts, fits: Sequence[FoldFit], is_scaled: bool) -> ByFit:
    """Logits of all cells, `(classes, cells)` float64, by each fit. If `is_scaled`, each gene is
    divided by its standard deviation over the fit's cells.

    Leaves out fits whose rounds do not converge.
    """
    groups: list[ByFit] = []  # starts of the fits that take their steps together
    n_stacked = 0
    for number, fit in enumerate(fits):
        n_classes = len(fit.targets)
        if not groups or n_stacked + n_classes > MAX_STACKED_CLASSES:
            groups.append({})
            n_stacked = 0
        groups[-1][number] = np.zeros(fit.targets.shape)
        n_stacked += n_classes
    logits: ByFit = {}
    for starts in groups:
        logits |= _FoldFits(products, fits, is_scaled).solve(starts)
    return logits


class _FoldFits:
    """Fits that share products of cells."""

    def __init__(self, products: CellProducts, fits: Sequence[FoldFit], is_scaled: bool) -> None:
        self.fits = fits
        self.profiles = products.profiles
        self.is_scaled = is_scaled
        self.products = products.scaled if is_scaled else products.plain

    def solve(self, starts: ByFit) -> ByFit:
        """Logits of all cells by the fits that have a start."""
        dual_coefs = self._search(starts, {})
        if not self.is_scaled:
            return self._multiply(dual_coefs)
        is_fitted = np.zeros((len(starts), self.profiles.shape[0]))
        for row, number in zip(is_fitted, starts):
            row[self.fits[number].cells] = 1
        scales = compute_scales(self.profiles, is_fitted)
        inverse_variances = dict(zip(starts, scales**-2.0))
        converged: ByFit = {}
        constants = {number: np.zeros_like(start) for number, start in starts.items()}
        for _ in range(MAX_ROUNDS):
            if not dual_coefs:
                break
            previous = constants
            exact = self._multiply_scaled(dual_coefs, inverse_variances)
            approximate = self._multiply(dual_coefs)
            constants = {}
            for number in dual_coefs:
                difference = exact[number] - approximate[number]
                constants[number] = difference[:, self.fits[number].cells]
            dual_coefs = self._search(dual_coefs, constants)
            for number in [*dual_coefs]:
                change = np.abs(constants[number] - previous[number]).max()
                if change <= CONSTANT_TOLERANCE:
                    converged[number] = dual_coefs.pop(number)
        return self._multiply_scaled(converged, inverse_variances) if converged else {}

    def _search(self, starts: ByFit, constants: ByFit) -> ByFit:
        """Dual coefficients at the optima, from the shared products; the fits take their steps together."""
        searches: dict[int, Search] = {}
        for number, start in starts.items():
            targets = self.fits[number].targets
            added = constants.get(number, 0.0)
            searches[number] = newton.search_optimum(Unwhitened(), targets, start, added)
        optima: ByFit = {}
        while searches:
            requests = {}
            for number in [*searches]:
                try:
                    requests[number] = next(searches[number])
                except StopIteration as end:
                    optima[number] = end.value
                    del searches[number]
            if requests:
                dual_coefs = {number: fit_coefs for number, (fit_coefs, _) in requests.items()}
                products = self._stack(dual_coefs) @ self.products
                for number, class_rows in _split(dual_coefs, products):
                    fit_coefs, logits = requests[number]
                    logits[:] = class_rows[:, self.fits[number].cells]
                    logits += fit_coefs.sum(1, keepdims=True)
                    logits /= self.fits[number].penalty
        return optima

    def _multiply(self, dual_coefs: ByFit) -> ByFit:
        """Logits of all cells, from the shared products."""
        return self._make_logits(dual_coefs, self._stack(dual_coefs) @ self.products)

    def _multiply_scaled(self, dual_coefs: ByFit, inverse_variances: ByFit) -> ByFit:
        """Logits of all cells, from genes divided by their standard deviations over each fit's cells.

        `inverse_variances`, `(genes,)` of each fit, are over the same cells.
        """
        coefficients = self.profiles.T @ np.ascontiguousarray(self._stack(dual_coefs).T)
        for number, class_rows in _split(dual_coefs, coefficients.T):
            class_rows *= inverse_variances[number]
        return self._make_logits(dual_coefs, (self.profiles @ coefficients).T)

    def _stack(self, dual_coefs: ByFit) -> np.ndarray:
        """Dual coefficients of all fits, `(classes of all fits, cells)`; 0 for cells that a fit does not read."""
        n_classes = sum(map(len, dual_coefs.values()))
        stacked = np.zeros((n_classes, self.profiles.shape[0]), self.products.dtype)
        for number, class_rows in _split(dual_coefs, stacked):
            class_rows[:, self.fits[number].cells] = dual_coefs[number]
        return stacked

    def _make_logits(self, dual_coefs: ByFit, products: np.ndarray) -> ByFit:
        """Logits from the products of the cells with the dual coefficients."""
        logits: ByFit = {}
        for number, class_rows in _split(dual_coefs, products):
            constant = dual_coefs[number].sum(1, keepdims=True)
            logits[number] = (class_rows + constant) / self.fits[number].penalty
        return logits


def _split(dual_coefs: ByFit, stacked: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """The rows of `stacked`, `(classes of all fits, ...)`, that belong to each fit."""
    first = 0
    for number, classes in dual_coefs.items():
        last = first + len(classes)
        yield number, stacked[first:last]
        first = last
