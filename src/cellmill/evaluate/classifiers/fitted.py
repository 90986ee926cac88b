"""Classifiers that are fitted on every kind of features.

Each kind of features gets nearest neighbours, and logistic regression (`logistic.py`) on standardised
and on unchanged features. Standardising raises the weight of small principal components, which helps
or hurts, depending on the number of cells. Genes by rank get only the standardised regression.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, Self

import numpy as np
import scipy.sparse as sp
from sklearn import config_context
from sklearn.utils.extmath import row_norms
from threadpoolctl import ThreadpoolController

from cellmill.config.plugin import load
from cellmill.evaluate.classifiers.dual import FoldRegression, fit_folds
from cellmill.evaluate.classifiers.logistic import LogisticRegression, is_small_problem
from cellmill.evaluate.features.products import SharedCells
from cellmill.evaluate.methods import (
    KNN,
    RANKED,
    REGRESSION,
    UNSCALED_REGRESSION,
    ByMethod,
    Features,
)
from cellmill.evaluate.prediction_cache import CachedClassifiers, report_early_stop
from cellmill.evaluate.splits import Fold
from cellmill.evaluate.task import Context
from cellmill.runs.results import ScoredMethod

COMPARED = 512  # cells compared with all fitted cells at once
# libraries with threads; finding them takes longer than many fits
_threaded_libraries = cache(ThreadpoolController)


class NearestCells:
    """Predicts the most frequent class of the nearest fitted cells, by Euclidean distance; the
    first of equally frequent classes.
    """

    def __init__(self, neighbors: int) -> None:
        self.neighbors = neighbors

    def __repr__(self) -> str:
        """Part of the key of a cached prediction, with all options."""
        return f"NearestCells({self.neighbors})"

    def fit(self, features: Any, labels: np.ndarray) -> Self:
        """Keep `features`, `(cells, width)`, dense or sparse, and `labels`, `(cells,)`."""
        self.classes, class_of_cell = np.unique(labels, return_inverse=True)
        self._votes = np.eye(len(self.classes))[class_of_cell]  # (cells, classes)
        self._shared = features if isinstance(features, SharedCells) else None
        if self._shared is not None:
            self._squares = features.squares()
            return self
        values = features.astype(np.float64)
        self._squares = row_norms(values, squared=True)
        self._transposed = values.T.tocsr() if sp.issparse(values) else values.T
        return self

    def predict(self, features: Any) -> np.ndarray:
        """The class of each cell, `(cells,)`, of features `(cells, width)`."""
        class_ids = []
        for start in range(0, features.shape[0], COMPARED):
            block = features[start : start + COMPARED]
            if self._shared is not None:
                products = block.products(self._shared)
            else:
                products = block.astype(np.float64) @ self._transposed  # (block, fitted cells)
            if sp.issparse(products):
                products = products.toarray()
            # squared distances without the cell's own square, which is the same for all
            distances = self._squares - 2 * products
            nearest = distances.argpartition(self.neighbors - 1, axis=1)[:, : self.neighbors]
            class_ids.append(self._votes[nearest].sum(1).argmax(1))
        return self.classes[np.concatenate(class_ids)]


def make_classifiers(neighbors: int, installed: Iterable[str] = ()) -> dict[str, Any]:
    """Unfitted classifiers by name, and the classifiers of installed packages."""
    return {
        REGRESSION: LogisticRegression(standardised=True),
        UNSCALED_REGRESSION: LogisticRegression(standardised=False),
        KNN: NearestCells(neighbors),
        **{name: load("classifier", name)() for name in installed},
    }


@contextmanager
def without_overhead() -> Iterator[None]:
    """Fit and predict without threads and scikit-learn's checks, which would take longer than the
    work itself.
    """
    with (
        _threaded_libraries().limit(limits=1),
        config_context(assume_finite=True, skip_parameter_validation=True),
    ):
        yield


def make_cached_classifiers(
    features: Features, labels: np.ndarray, neighbors: int, context: Context
) -> dict[ScoredMethod, CachedClassifiers]:
    """Classifiers by features, `(cells, width)` each, dense or sparse. A classifier is fitted when it is
    first asked for a prediction that is not known.

    Predictions of other packages' classifiers are never saved, because their code may change.
    """
    saved = context.prediction_cache.predictions
    unsaved = context.prediction_cache.unsaved_predictions
    installed = context.options.classifiers
    by_features = {}
    for method, values in features.items():
        classifiers = make_classifiers(min(neighbors, len(labels)), installed)
        if method == RANKED:
            classifiers = {REGRESSION: classifiers[REGRESSION]}
        # no other run has features by a network
        known = saved if method.network is None else unsaved
        known_by_name = dict.fromkeys(classifiers, known) | dict.fromkeys(installed, unsaved)
        by_features[method] = CachedClassifiers(known_by_name, classifiers, values, labels)
    return by_features


def precompute_folds(
    shared: SharedCells,
    labels: np.ndarray,
    folds: Sequence[Fold],
    known: dict[str, np.ndarray],
    names: Iterable[str] = (REGRESSION, UNSCALED_REGRESSION),
) -> None:
    """Fill `known`, a cache of predictions by key, where `CachedClassifiers` finds them: fit the large
    regressions on `shared` features together for all folds.

    A regression is large if it has no more cells than genes and is not a small problem.
    """
    for name in names:
        classifier = LogisticRegression(standardised=name == REGRESSION)
        regressions: list[FoldRegression] = []
        tested: list[tuple[str, np.ndarray, np.ndarray]] = []  # key, cells, classes
        for fold in folds:
            fitted = shared[fold.fitted]
            fitted_labels = labels[fold.fitted]
            n, width = fitted.shape
            if n > width or is_small_problem(fitted.shape):
                continue
            cached = CachedClassifiers({name: known}, {name: classifier}, fitted, fitted_labels)
            key = cached.keys(shared[fold.tested])[name]
            if key not in known:
                classes, class_of_cell = np.unique(fitted_labels, return_inverse=True)
                targets = np.eye(len(classes))[:, class_of_cell]
                regressions.append(FoldRegression(fitted.rows, targets))
                tested.append((key, shared.rows[fold.tested], classes))
        if not regressions:
            continue  # without the products of the cells
        with report_early_stop(name, shared.shape[1]):
            logits = fit_folds(shared.source, regressions, classifier.standardised)
        shared.source.forget_scaled()  # before the products of the next name fill as much memory
        for number, fold_logits in logits.items():
            key, cells, classes = tested[number]
            known[key] = classes[fold_logits[:, cells].argmax(0)]


def predict_all(fitted: Mapping[ScoredMethod, CachedClassifiers], features: Features) -> ByMethod:
    """Predicted classes, text `(cells,)`, by features and classifier."""
    predicted = {}
    for method, classifiers in fitted.items():
        for name, classes in classifiers.predict(features[method]).items():
            predicted[replace(method, classifier=name)] = classes
    return predicted


def predict_majority(labels: np.ndarray, n: int) -> np.ndarray:
    """The largest class of the fitted `labels`, or the first of equally large classes, for each of
    `n` cells: text `(n,)`.
    """
    classes, sizes = np.unique(labels, return_counts=True)
    return np.full(n, classes[sizes.argmax()])
