"""Logistic regression on sparse features Z, by its dual coefficients.

Coefficients are Zᵀa / λ for dual coefficients a, one for each cell and class, so a fit needs only
products with ZZᵀ (`features.products`). `newton.py` searches for a.

The regressions of all folds take their steps together: one product of ZZᵀ with the dual coefficients
of all regressions costs little more than with those of one. Dual coefficients are 0 for cells that a
regression does not read.

Standard deviations are computed over the fitted cells, so each scaled regression has a ZZᵀ of its
own. A shared matrix K, scaled by all cells, stands in for it. From dual coefficients a fitted with K
alone, each round:

1. computes the offsets (ZZᵀ - K) a / λ, which are what K leaves out of the logits;
2. fits the dual coefficients again, with these offsets added to the logits;
3. finishes the regression if no offset changed by more than OFFSET_TOLERANCE since the last round.

The result does not depend on K.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cellmill.evaluate.classifiers import newton
from cellmill.evaluate.classifiers.newton import DualVector, Search, Unwhitened
from cellmill.evaluate.features.products import CellProducts, compute_scales

MAX_ROUNDS = 12  # rounds with K, after which the regression is left to `fit_dual_coefs`
OFFSET_TOLERANCE = 1e-3  # largest change of an offset by the last round
MAX_STACKED_CLASSES = 256  # classes of all regressions that take steps together
ByRegression = dict[int, np.ndarray]
"""An array of each regression, by its index in the list: dual coefficients, logits, or one value per gene."""


@dataclass(frozen=True)
class FoldRegression:
    """A regression that reads some of the cells."""

    cells: np.ndarray  # indices of the fitted cells
    targets: np.ndarray  # one-hot, `(classes, fitted cells)`

    @property
    def penalty(self) -> float:
        return newton.compute_penalty(*self.targets.shape)


def fit_dual_coefs(features: Any, targets: np.ndarray) -> np.ndarray:
    """Fit to `features`, `(cells, width)`, and a constant feature of 1. Return the dual coefficients
    a, `(classes, cells)`.

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
            intercept_part = dual_coefs.sum(1, keepdims=True)
            np.divide((features @ coefficients).T + intercept_part, penalty, out=out)
        else:
            np.divide(dual_coefs @ products, penalty, out=out)

    search = newton.search_optimum(Unwhitened(), targets)
    return newton.run_search(search, compute_logits)


def fit_folds(
    products: CellProducts, regressions: Sequence[FoldRegression], is_scaled: bool
) -> ByRegression:
    """Logits of all cells, `(classes, cells)` float64, by each regression. If `is_scaled`, each gene is
    divided by its standard deviation over the regression's cells.

    Leaves out regressions whose rounds do not converge.
    """
    # initial coefficients of the regressions that take their steps together
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
    """Fits regressions together, by products of cells that they share."""

    def __init__(
        self, products: CellProducts, regressions: Sequence[FoldRegression], is_scaled: bool
    ) -> None:
        self.regressions = regressions
        self.profiles = products.profiles
        self.is_scaled = is_scaled
        # `(n, n)`: the module's ZZᵀ, or K if the regressions are scaled
        self.shared = products.scaled if is_scaled else products.plain

    def solve(self, initial_coefs: ByRegression) -> ByRegression:
        """Logits of all cells by the regressions in `initial_coefs`."""
        dual_coefs = self._search(initial_coefs, {})
        if self.is_scaled:
            return self._run_rounds(dual_coefs)
        return self._shared_logits(dual_coefs)

    def _run_rounds(self, pending: ByRegression) -> ByRegression:
        """Logits of all cells by the scaled regressions that finish within MAX_ROUNDS (see the module).

        `pending` are dual coefficients fitted with K alone.
        """
        inverse_variances = self._invert_variances(sorted(pending))
        offsets = {index: np.zeros_like(coefs) for index, coefs in pending.items()}
        finished: ByRegression = {}
        for _ in range(MAX_ROUNDS):
            if not pending:
                break
            previous = offsets
            exact = self._own_scale_logits(pending, inverse_variances)
            approximate = self._shared_logits(pending)
            offsets = {
                index: (exact[index] - approximate[index])[:, self.regressions[index].cells]
                for index in pending
            }
            dual_coefs = self._search(pending, offsets)
            pending = {}
            for index, coefs in dual_coefs.items():
                change = np.abs(offsets[index] - previous[index]).max()
                (finished if change <= OFFSET_TOLERANCE else pending)[index] = coefs
        return self._own_scale_logits(finished, inverse_variances) if finished else {}

    def _search(self, initial_coefs: ByRegression, offsets: ByRegression) -> ByRegression:
        """Dual coefficients at the optima by the shared matrix, with `offsets` added to the logits."""
        searches: dict[int, Search] = {}
        for index, start in initial_coefs.items():
            targets = self.regressions[index].targets
            added = offsets.get(index, 0.0)
            searches[index] = newton.search_optimum(Unwhitened(), targets, start, added)
        optima: ByRegression = {}
        while searches:
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
        """Write the logits of vectors that searches wait for (`newton.Search`), in one product."""
        dual_coefs = {index: vector.dual_coefs for index, vector in vectors.items()}
        products = self._stack(dual_coefs) @ self.shared
        for index, class_rows in _split(dual_coefs, products):
            regression = self.regressions[index]
            logits = vectors[index].logits
            logits[:] = class_rows[:, regression.cells]
            logits += dual_coefs[index].sum(1, keepdims=True)
            logits /= regression.penalty

    def _shared_logits(self, dual_coefs: ByRegression) -> ByRegression:
        """Logits of all cells, by the shared matrix."""
        return self._add_intercepts(dual_coefs, self._stack(dual_coefs) @ self.shared)

    def _own_scale_logits(
        self, dual_coefs: ByRegression, inverse_variances: ByRegression
    ) -> ByRegression:
        """Logits of all cells, by each regression's own ZZᵀ."""
        coefficients = self.profiles.T @ np.ascontiguousarray(self._stack(dual_coefs).T)
        for index, class_rows in _split(dual_coefs, coefficients.T):
            class_rows *= inverse_variances[index]
        return self._add_intercepts(dual_coefs, (self.profiles @ coefficients).T)

    def _invert_variances(self, indices: Sequence[int]) -> ByRegression:
        """1 / variance of each gene over the cells of each regression, `(genes,)`."""
        is_fitted = np.zeros((len(indices), self.profiles.shape[0]))
        for row, index in zip(is_fitted, indices):
            row[self.regressions[index].cells] = 1
        return dict(zip(indices, compute_scales(self.profiles, is_fitted) ** -2.0))

    def _stack(self, dual_coefs: ByRegression) -> np.ndarray:
        """Dual coefficients of all regressions, `(classes of all, cells)`; 0 for cells that a regression
        does not read.
        """
        n_classes = sum(map(len, dual_coefs.values()))
        stacked = np.zeros((n_classes, self.profiles.shape[0]), self.shared.dtype)
        for index, class_rows in _split(dual_coefs, stacked):
            class_rows[:, self.regressions[index].cells] = dual_coefs[index]
        return stacked

    def _add_intercepts(self, dual_coefs: ByRegression, products: np.ndarray) -> ByRegression:
        """Logits from the products of the cells with the dual coefficients."""
        logits: ByRegression = {}
        for index, class_rows in _split(dual_coefs, products):
            intercept_part = dual_coefs[index].sum(1, keepdims=True)
            logits[index] = (class_rows + intercept_part) / self.regressions[index].penalty
        return logits


def _split(dual_coefs: ByRegression, stacked: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """The rows of `stacked`, `(classes of all, ...)`, that belong to each regression."""
    start = 0
    for index, classes in dual_coefs.items():
        stop = start + len(classes)
        yield index, stacked[start:stop]
        start = stop
