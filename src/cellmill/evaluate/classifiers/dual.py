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
ByNumber = dict[int, np.ndarray]
"""An array of each regression, by its number: dual coefficients, logits, or one value per gene."""


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
            intercept_part = dual_coefs.sum(1, keepdims=True)
            np.divide((features @ coefficients).T + intercept_part, penalty, out=out)
        else:
            np.divide(dual_coefs @ products, penalty, out=out)

    search = newton.search_optimum(Unwhitened(), targets)
    return newton.run_search(search, compute_logits) / penalty


def fit_folds(
    products: CellProducts, regressions: Sequence[FoldRegression], is_scaled: bool
) -> ByNumber:
    """Logits of all cells, `(classes, cells)` float64, by each regression. If `is_scaled`, each gene is
    divided by its standard deviation over the regression's cells.

    Leaves out regressions whose rounds do not converge.
    """
    groups: list[ByNumber] = []  # starts of the regressions that take their steps together
    n_stacked = 0
    for number, regression in enumerate(regressions):
        n_classes = len(regression.targets)
        if not groups or n_stacked + n_classes > MAX_STACKED_CLASSES:
            groups.append({})
            n_stacked = 0
        groups[-1][number] = np.zeros(regression.targets.shape)
        n_stacked += n_classes
    solver = _SharedSolver(products, regressions, is_scaled)
    logits: ByNumber = {}
    for starts in groups:
        logits |= solver.solve(starts)
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

    def solve(self, starts: ByNumber) -> ByNumber:
        """Logits of all cells by the regressions that have a start."""
        dual_coefs = self._search(starts, {})
        if self.is_scaled:
            return self._run_rounds(dual_coefs)
        return self._multiply(dual_coefs)

    def _run_rounds(self, pending: ByNumber) -> ByNumber:
        """Logits of all cells by the scaled regressions that finish within MAX_ROUNDS (see the module).

        `pending` are dual coefficients fitted with K alone.
        """
        inverse_variances = self._invert_variances(sorted(pending))
        offsets = {number: np.zeros_like(coefs) for number, coefs in pending.items()}
        finished: ByNumber = {}
        for _ in range(MAX_ROUNDS):
            if not pending:
                break
            previous = offsets
            exact = self._multiply_scaled(pending, inverse_variances)
            approximate = self._multiply(pending)
            offsets = {
                number: (exact[number] - approximate[number])[:, self.regressions[number].cells]
                for number in pending
            }
            dual_coefs = self._search(pending, offsets)
            pending = {}
            for number, coefs in dual_coefs.items():
                change = np.abs(offsets[number] - previous[number]).max()
                (finished if change <= OFFSET_TOLERANCE else pending)[number] = coefs
        return self._multiply_scaled(finished, inverse_variances) if finished else {}

    def _search(self, starts: ByNumber, offsets: ByNumber) -> ByNumber:
        """Dual coefficients at the optima by the shared matrix, with `offsets` added to the logits."""
        searches: dict[int, Search] = {}
        for number, start in starts.items():
            targets = self.regressions[number].targets
            added = offsets.get(number, 0.0)
            searches[number] = newton.search_optimum(Unwhitened(), targets, start, added)
        optima: ByNumber = {}
        while searches:
            vectors = {}
            for number, search in [*searches.items()]:
                try:
                    vectors[number] = next(search)
                except StopIteration as end:
                    optima[number] = end.value
                    del searches[number]
            if vectors:
                self._compute_logits(vectors)
        return optima

    def _compute_logits(self, vectors: dict[int, DualVector]) -> None:
        """Write the logits of vectors that searches wait for (`newton.Search`), in one product."""
        dual_coefs = {number: vector.dual_coefs for number, vector in vectors.items()}
        products = self._stack(dual_coefs) @ self.shared
        for number, class_rows in _split(dual_coefs, products):
            regression = self.regressions[number]
            logits = vectors[number].logits
            logits[:] = class_rows[:, regression.cells]
            logits += dual_coefs[number].sum(1, keepdims=True)
            logits /= regression.penalty

    def _multiply(self, dual_coefs: ByNumber) -> ByNumber:
        """Logits of all cells, by the shared matrix."""
        return self._make_logits(dual_coefs, self._stack(dual_coefs) @ self.shared)

    def _multiply_scaled(self, dual_coefs: ByNumber, inverse_variances: ByNumber) -> ByNumber:
        """Logits of all cells, by each regression's own ZZᵀ."""
        coefficients = self.profiles.T @ np.ascontiguousarray(self._stack(dual_coefs).T)
        for number, class_rows in _split(dual_coefs, coefficients.T):
            class_rows *= inverse_variances[number]
        return self._make_logits(dual_coefs, (self.profiles @ coefficients).T)

    def _invert_variances(self, numbers: Sequence[int]) -> ByNumber:
        """1 / variance of each gene over the cells of each regression, `(genes,)`."""
        is_fitted = np.zeros((len(numbers), self.profiles.shape[0]))
        for row, number in zip(is_fitted, numbers):
            row[self.regressions[number].cells] = 1
        return dict(zip(numbers, compute_scales(self.profiles, is_fitted) ** -2.0))

    def _stack(self, dual_coefs: ByNumber) -> np.ndarray:
        """Dual coefficients of all regressions, `(classes of all, cells)`; 0 for cells that a regression
        does not read.
        """
        n_classes = sum(map(len, dual_coefs.values()))
        stacked = np.zeros((n_classes, self.profiles.shape[0]), self.shared.dtype)
        for number, class_rows in _split(dual_coefs, stacked):
            class_rows[:, self.regressions[number].cells] = dual_coefs[number]
        return stacked

    def _make_logits(self, dual_coefs: ByNumber, products: np.ndarray) -> ByNumber:
        """Logits from the products of the cells with the dual coefficients."""
        logits: ByNumber = {}
        for number, class_rows in _split(dual_coefs, products):
            intercept_part = dual_coefs[number].sum(1, keepdims=True)
            logits[number] = (class_rows + intercept_part) / self.regressions[number].penalty
        return logits


def _split(dual_coefs: ByNumber, stacked: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """The rows of `stacked`, `(classes of all, ...)`, that belong to each regression."""
    start = 0
    for number, classes in dual_coefs.items():
        stop = start + len(classes)
        yield number, stacked[start:stop]
        start = stop
