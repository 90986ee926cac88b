"""Logistic regression on sparse features Z, by its dual coefficients.

A regression has a dual coefficient for each cell and class. With dual coefficients a and the penalty λ,
the coefficients of the features are Zᵀa / λ. So a fit needs only products with ZZᵀ, the dot products of
all pairs of cells (`features.products`). `newton.py` searches for a.

The regressions of all folds take their steps together. One product of ZZᵀ with the dual coefficients of
all regressions takes little more time than a product for one regression. Cells that a regression does not
read have dual coefficients of 0.

A scaled regression divides each gene by its standard deviation over the fitted cells. So each scaled
regression has its own ZZᵀ. A shared matrix K, scaled by the standard deviations over all cells, is used in
its place. The dual coefficients a are first fitted with K alone. Then each round corrects the error of K:

1. It computes the offsets (ZZᵀ - K) a / λ. They are the true logits minus the logits with K.
2. It fits the dual coefficients again, with these offsets added to the logits.
3. It finishes a regression if no offset has changed by more than OFFSET_TOLERANCE since the last round.

The result does not depend on K.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cellmill.evaluate.classifiers import newton
from cellmill.evaluate.classifiers.newton import DualVector, Search, Unwhitened
from cellmill.evaluate.features.products import CellProducts, compute_scales

MAX_ROUNDS = 12  # a regression that is not finished after this many rounds has no result
# an offset of a finished regression changed by at most this in the last round
OFFSET_TOLERANCE = 1e-3
MAX_STACKED_CLASSES = 256  # at most this many classes, of all regressions that take steps together
ByRegression = dict[int, np.ndarray]
"""An array by the index of a regression: dual coefficients, logits, or a value of each gene."""


@dataclass(frozen=True)
class FoldRegression:
    """A regression that is fitted on some of the cells."""

    cells: np.ndarray  # indices of the fitted cells
    targets: np.ndarray  # (classes, fitted cells): 1 for the class of a cell, else 0

    @property
    def penalty(self) -> float:
        """The penalty λ."""
        return newton.compute_penalty(*self.targets.shape)


def fit_dual_coefs(features: Any, targets: np.ndarray) -> np.ndarray:
    """Fit one regression to `features`, `(cells, width)`, and to an added feature that is always 1.

    `features` are sparse, or dense if they are small. `targets`, `(classes, cells)`, are 1 for the class of
    a cell, else 0. Returns the dual coefficients, `(classes, cells)`.
    """
    n_cells = targets.shape[1]
    penalty = newton.compute_penalty(*targets.shape)
    # the products of cells are stored if they are a smaller matrix than the dense features
    products = None
    if isinstance(features, np.ndarray) and n_cells <= features.shape[1]:
        products = features @ features.T
        products += 1  # the product of the added features

    def compute_logits(dual_coefs: np.ndarray, out: np.ndarray) -> None:
        # without stored products, multiply by the features twice
        if products is None:
            coefficients = features.T @ dual_coefs.T.astype(features.dtype)
            intercept_part = dual_coefs.sum(1, keepdims=True)
            np.divide((features @ coefficients).T + intercept_part, penalty, out=out)
        else:
            np.divide(dual_coefs @ products, penalty, out=out)

    search = newton.search_optimum(Unwhitened(), targets)
    return newton.run_search(search, compute_logits)


def fit_folds(
    products: CellProducts, regressions: Sequence[FoldRegression], is_scaled: bool
) -> ByRegression:
    """Fit `regressions`, and return the logits of all cells by each of them, `(classes, cells)` float64.

    If `is_scaled`, each gene is divided by its standard deviation over the fitted cells of a regression.
    The result has no entry for a regression with rounds that do not converge.
    """
    # groups of regressions that take their steps together, each with its initial dual coefficients
    groups: list[ByRegression] = []
    n_stacked = 0
    for index, regression in enumerate(regressions):
        n_classes = len(regression.targets)
        if not groups or n_stacked + n_classes > MAX_STACKED_CLASSES:
            groups.append({})
            n_stacked = 0
        groups[-1][index] = np.zeros(regression.targets.shape)
        n_stacked += n_classes
    solver = _SharedSolver(products, regressions, is_scaled)
    logits: ByRegression = {}
    for initial_coefs in groups:
        logits |= solver.solve(initial_coefs)
    return logits


class _SharedSolver:
    """Fits regressions together, by a matrix of products that all of them share."""

    def __init__(
        self, products: CellProducts, regressions: Sequence[FoldRegression], is_scaled: bool
    ) -> None:
        self.regressions = regressions
        self.profiles = products.profiles
        self.is_scaled = is_scaled
        # (cells, cells): ZZᵀ, or K if the regressions are scaled
        self.shared = products.scaled if is_scaled else products.plain

    def solve(self, initial_coefs: ByRegression) -> ByRegression:
        """Fit the regressions in `initial_coefs`, and return the logits of all cells."""
        dual_coefs = self._search(initial_coefs, {})
        if self.is_scaled:
            return self._run_rounds(dual_coefs)
        return self._compute_shared_logits(dual_coefs)

    def _run_rounds(self, pending: ByRegression) -> ByRegression:
        """Run the rounds of scaled regressions, and return the logits of all cells.

        `pending` are dual coefficients that were fitted with K alone. The docstring of this module has the
        steps of a round. The result has the regressions that finish within MAX_ROUNDS.
        """
        inverse_variances = self._invert_variances(sorted(pending))
        offsets = {index: np.zeros_like(coefs) for index, coefs in pending.items()}
        finished: ByRegression = {}
        for _ in range(MAX_ROUNDS):
            if not pending:
                break
            previous = offsets
            # step 1: offsets of the fitted cells
            exact = self._compute_own_logits(pending, inverse_variances)
            approximate = self._compute_shared_logits(pending)
            offsets = {
                index: (exact[index] - approximate[index])[:, self.regressions[index].cells]
                for index in pending
            }
            # step 2: dual coefficients with these offsets
            dual_coefs = self._search(pending, offsets)
            # step 3: regressions with offsets that hardly changed are finished
            pending = {}
            for index, coefs in dual_coefs.items():
                change = np.abs(offsets[index] - previous[index]).max()
                group = finished if change <= OFFSET_TOLERANCE else pending
                group[index] = coefs
        return self._compute_own_logits(finished, inverse_variances) if finished else {}

    def _search(self, initial_coefs: ByRegression, offsets: ByRegression) -> ByRegression:
        """Search for the optima with the shared matrix, and with `offsets` added to the logits.

        Returns the dual coefficients at the optima. All searches run at once, so that one product serves
        all of them.
        """
        searches: dict[int, Search] = {}
        for index, start in initial_coefs.items():
            targets = self.regressions[index].targets
            added = offsets.get(index, 0.0)
            searches[index] = newton.search_optimum(Unwhitened(), targets, start, added)
        optima: ByRegression = {}
        while searches:
            # take the next vector of each search, and compute the logits of all of these vectors
            vectors = {}
            for index, search in [*searches.items()]:
                try:
                    vectors[index] = next(search)
                except StopIteration as end:
                    optima[index] = end.value
                    del searches[index]
            if vectors:
                self._write_fitted_logits(vectors)
        return optima

    def _write_fitted_logits(self, vectors: dict[int, DualVector]) -> None:
        """Compute the logits that searches wait for (`newton.Search`), in one product."""
        dual_coefs = {index: vector.dual_coefs for index, vector in vectors.items()}
        products = self._stack(dual_coefs) @ self.shared
        for index, class_rows in _split(dual_coefs, products):
            regression = self.regressions[index]
            logits = vectors[index].logits
            logits[:] = class_rows[:, regression.cells]
            logits += dual_coefs[index].sum(1, keepdims=True)
            logits /= regression.penalty

    def _compute_shared_logits(self, dual_coefs: ByRegression) -> ByRegression:
        """Compute the logits of all cells with the shared matrix."""
        return self._add_intercepts(dual_coefs, self._stack(dual_coefs) @ self.shared)

    def _compute_own_logits(
        self, dual_coefs: ByRegression, inverse_variances: ByRegression
    ) -> ByRegression:
        """Compute the logits of all cells with the own ZZᵀ of each scaled regression."""
        coefficients = self.profiles.T @ np.ascontiguousarray(self._stack(dual_coefs).T)
        for index, class_rows in _split(dual_coefs, coefficients.T):
            class_rows *= inverse_variances[index]
        return self._add_intercepts(dual_coefs, (self.profiles @ coefficients).T)

    def _invert_variances(self, indices: Sequence[int]) -> ByRegression:
        """Compute 1 / variance of each gene over the fitted cells of each regression, `(genes,)`."""
        is_fitted = np.zeros((len(indices), self.profiles.shape[0]))
        for row, index in zip(is_fitted, indices):
            row[self.regressions[index].cells] = 1
        return dict(zip(indices, compute_scales(self.profiles, is_fitted) ** -2.0))

    def _stack(self, dual_coefs: ByRegression) -> np.ndarray:
        """Stack the dual coefficients of all regressions, `(classes of all, cells)`.

        Cells that a regression does not read have 0.
        """
        n_classes = sum(map(len, dual_coefs.values()))
        stacked = np.zeros((n_classes, self.profiles.shape[0]), self.shared.dtype)
        for index, class_rows in _split(dual_coefs, stacked):
            class_rows[:, self.regressions[index].cells] = dual_coefs[index]
        return stacked

    def _add_intercepts(self, dual_coefs: ByRegression, products: np.ndarray) -> ByRegression:
        """Turn `products`, of the cells with stacked dual coefficients, into logits with intercepts."""
        logits: ByRegression = {}
        for index, class_rows in _split(dual_coefs, products):
            intercept_part = dual_coefs[index].sum(1, keepdims=True)
            logits[index] = (class_rows + intercept_part) / self.regressions[index].penalty
        return logits


def _split(dual_coefs: ByRegression, stacked: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each regression, and its rows of `stacked`, `(classes of all, ...)`."""
    start = 0
    for index, classes in dual_coefs.items():
        stop = start + len(classes)
        yield index, stacked[start:stop]
        start = stop
