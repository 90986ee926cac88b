"""Classifiers that are fitted on every kind of features.

Each kind of features gets three classifiers: nearest neighbours, and a logistic regression (`logistic.py`)
on standardised and on unchanged features. Standardising gives small principal components more weight,
which helps or hurts, depending on the number of cells. Ranked genes get only the regression on
standardised features.
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

COMPARED = 512  # at most this many cells are compared with all fitted cells at once
# Libraries that compute with threads. They are looked up once, because a look-up takes longer than a
# small fit.
_threaded_libraries = cache(ThreadpoolController)


class NearestCells:
    """Classifier that predicts the most frequent class among the nearest fitted cells.

    The distance is Euclidean. Of equally frequent classes, the first one is predicted.
    """

    def __init__(self, neighbors: int) -> None:
        self.neighbors = neighbors

    def __repr__(self) -> str:
        """Text with all options, which is a part of the key of a cached prediction."""
        return f"NearestCells({self.neighbors})"

    def fit(self, features: Any, labels: np.ndarray) -> Self:
        """Keep the fitted cells: their `features`, `(cells, width)`, and `labels`, `(cells,)`.

        Features are dense, sparse, or `SharedCells`.
        """
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
        """Predict the class of each cell, `(cells,)`, from `features`, `(cells, width)`."""
        class_ids = []
        for start in range(0, features.shape[0], COMPARED):
            block = features[start : start + COMPARED]
            if self._shared is not None:
                products = block.products(self._shared)
            else:
                products = block.astype(np.float64) @ self._transposed  # (block, fitted cells)
            if sp.issparse(products):
                products = products.toarray()
            # The squared distance of cells x and y is x·x - 2 x·y + y·y. Here x·x is left out, because
            # it does not change which fitted cells y are nearest to x.
            distances = self._squares - 2 * products
            nearest = distances.argpartition(self.neighbors - 1, axis=1)[:, : self.neighbors]
            class_ids.append(self._votes[nearest].sum(1).argmax(1))
        return self.classes[np.concatenate(class_ids)]


def make_classifiers(neighbors: int, installed: Iterable[str] = ()) -> dict[str, Any]:
    """Make unfitted classifiers by name: the built-in ones, and the classifiers `installed` by name."""
    return {
        REGRESSION: LogisticRegression(standardised=True),
        UNSCALED_REGRESSION: LogisticRegression(standardised=False),
        KNN: NearestCells(neighbors),
        **{name: load("classifier", name)() for name in installed},
    }


@contextmanager
def without_overhead() -> Iterator[None]:
    """Fit and predict without threads, and without scikit-learn's checks.

    For small problems, threads and checks take longer than the work itself.
    """
    with (
        _threaded_libraries().limit(limits=1),
        config_context(assume_finite=True, skip_parameter_validation=True),
    ):
        yield


def make_cached_classifiers(
    features: Features, labels: np.ndarray, neighbors: int, context: Context
) -> dict[ScoredMethod, CachedClassifiers]:
    """Make the classifiers for each kind of `features`, `(cells, width)`, dense or sparse.

    A classifier is fitted when a prediction is not known yet. Predictions by classifiers of other packages
    are never saved, because the code of these packages may change.
    """
    saved = context.prediction_cache.predictions
    unsaved = context.prediction_cache.unsaved_predictions
    installed = context.options.classifiers
    by_features = {}
    for method, values in features.items():
        classifiers = make_classifiers(min(neighbors, len(labels)), installed)
        if method == RANKED:
            classifiers = {REGRESSION: classifiers[REGRESSION]}
        # features of a network are those of one model, so no other evaluation could read the predictions
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
    """Fit the large regressions of all folds together, and put their predictions into `known`.

    `known` are predictions by key, where `CachedClassifiers` will find them. `shared` are the features of
    all cells, and `labels`, `(cells,)`, their classes. A regression is large if it has no more cells than
    genes, and is not a small problem (`is_small_problem`).
    """
    for name in names:
        classifier = LogisticRegression(standardised=name == REGRESSION)

        # list the large regressions with predictions that are not known
        regressions: list[FoldRegression] = []
        # of each regression: key of its predictions, tested cells, and names of its classes
        tested: list[tuple[str, np.ndarray, np.ndarray]] = []
        for fold in folds:
            fitted = shared[fold.fitted]
            fitted_labels = labels[fold.fitted]
            n_cells, n_genes = fitted.shape
            if n_cells > n_genes or is_small_problem(fitted.shape):
                continue
            cached = CachedClassifiers({name: known}, {name: classifier}, fitted, fitted_labels)
            key = cached.keys(shared[fold.tested])[name]
            if key not in known:
                classes, class_of_cell = np.unique(fitted_labels, return_inverse=True)
                targets = np.eye(len(classes))[:, class_of_cell]
                regressions.append(FoldRegression(fitted.rows, targets))
                tested.append((key, shared.rows[fold.tested], classes))
        if not regressions:
            continue  # so the products of the cells are not computed

        # fit all of them together
        with report_early_stop(name, shared.shape[1]):
            logits = fit_folds(shared.source, regressions, classifier.standardised)
        # the products for the next name need as much memory
        shared.source.forget_scaled()
        for number, fold_logits in logits.items():
            key, cells, classes = tested[number]
            known[key] = classes[fold_logits[:, cells].argmax(0)]


def predict_all(fitted: Mapping[ScoredMethod, CachedClassifiers], features: Features) -> ByMethod:
    """Predict the classes of cells, `(cells,)` text, by each method: features with a classifier."""
    predicted = {}
    for method, classifiers in fitted.items():
        for name, classes in classifiers.predict(features[method]).items():
            predicted[replace(method, classifier=name)] = classes
    return predicted


def predict_majority(labels: np.ndarray, n_cells: int) -> np.ndarray:
    """Predict the largest class of the fitted `labels` for each of `n_cells` cells, `(n_cells,)` text.

    Of equally large classes, the first one is predicted.
    """
    classes, sizes = np.unique(labels, return_counts=True)
    return np.full(n_cells, classes[sizes.argmax()])
