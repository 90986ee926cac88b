"""Cache of baseline predictions, principal components and clusters of a dataset.

All evaluations of a dataset share one cache, a .npz file of arrays that are never pickled. The key of a
prediction is a SHA-256. It covers the classifier, the features and labels of the fitted cells, the
features of the tested cells, and `describe_algorithms`. If you change an algorithm without changing one
of its constants, delete the caches.
"""

import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import scipy
import sklearn
from sklearn.exceptions import ConvergenceWarning

from cellmill.evaluate.classifiers import dual, logistic, newton
from cellmill.evaluate.features import components, neighbors, products
from cellmill.evaluate.features.products import digest_arrays
from cellmill.files import atomic_path

ALGORITHMS = (components, neighbors, products, dual, logistic, newton)
VERSIONS = f"scikit-learn {sklearn.__version__}, NumPy {np.__version__}, SciPy {scipy.__version__}"
# Features of at most this many bytes are kept. Larger ones would slow down every evaluation, because an
# evaluation reads the whole file.
MAX_BYTES = 2**20


def describe_algorithms() -> str:
    """Describe the algorithms as a part of each key.

    The text has the versions of packages, and all constants of the modules ALGORITHMS that are numbers.
    """
    constants = [
        f"{module.__name__}.{name}={value!r}"
        for module in ALGORITHMS
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, int | float)
    ]
    return ", ".join([VERSIONS, *constants])


class KnownPredictions(dict[str, np.ndarray]):
    """Predictions by key. Reads of predictions by earlier evaluations are counted."""

    def __init__(self, stored: Mapping[str, np.ndarray]) -> None:
        super().__init__(stored)
        self.stored_keys = frozenset(stored)  # keys of predictions by earlier evaluations
        self.n_stored_reads = 0  # how often such a prediction was read

    def __getitem__(self, key: str) -> np.ndarray:
        self.n_stored_reads += key in self.stored_keys
        return super().__getitem__(key)


class PredictionCache:
    """Known predictions by key.

    `save` writes the predictions to the .npz file `file`. Without a file, they last as long as this process.
    """

    def __init__(self, file: Path | None = None) -> None:
        self.file = file
        self.predictions = KnownPredictions(_read(file))
        # Predictions that are not saved. Their features come from one model, which no other evaluation has,
        # or their classifier comes from another package.
        self.unsaved_predictions: dict[str, np.ndarray] = {}

    def get_or_compute(
        self, about: str, values: Any, compute: Callable[[], np.ndarray]
    ) -> np.ndarray:
        """Return the known result of `compute`, or call `compute`.

        The key of the result is made from `values`, dense or sparse, and from the text `about`. The text
        must say everything else that the result depends on. A new result of at most MAX_BYTES is kept.
        """
        key = digest_arrays(f"{about} of {describe_algorithms()}", values)
        result = self.predictions[key] if key in self.predictions else compute()
        if result.nbytes <= MAX_BYTES:
            self.predictions[key] = result
        return result

    def save(self) -> None:
        """Write the file again if there are new predictions.

        If two evaluations save at the same time, the new predictions of one evaluation may be lost.
        """
        if self.file is not None and self.predictions.keys() > self.predictions.stored_keys:
            arrays: dict[str, Any] = _read(self.file) | self.predictions
            with atomic_path(self.file) as temporary:
                np.savez_compressed(temporary, **arrays)


class CachedClassifiers:
    """Classifiers by name, which are fitted only for predictions that are not known yet.

    A classifier is fitted on `features`, `(cells, width)`, and `labels`, `(cells,)`. `known` has the known
    predictions of each classifier, by key. New predictions are added to `known`.
    """

    def __init__(
        self,
        known: Mapping[str, dict[str, np.ndarray]],
        classifiers: Mapping[str, Any],
        features: Any,
        labels: np.ndarray,
    ) -> None:
        self._known = known
        self._classifiers = classifiers
        self._classes, class_of_cell = np.unique(labels, return_inverse=True)
        self._get_fitted = cache(lambda name: fit(name, classifiers[name], features, class_of_cell))
        self._digest = digest_arrays(describe_algorithms(), features, self._classes, class_of_cell)

    def keys(self, features: Any) -> dict[str, str]:
        """Return the key of each classifier's predictions on `features`, by the name of the classifier."""
        digest = digest_arrays(self._digest, features)
        return {
            name: digest_arrays(f"{name}: {classifier!r} on {digest}")
            for name, classifier in self._classifiers.items()
        }

    def predict(self, features: Any) -> dict[str, np.ndarray]:
        """Predict the classes of the cells with `features`, `(cells,)` text, by each classifier."""
        predicted = {}
        for name, key in self.keys(features).items():
            known = self._known[name]
            if key not in known:
                known[key] = self._classes[self._get_fitted(name).predict(features)]
            predicted[name] = known[key]
        return predicted


_shown_warnings: set[tuple[Any, ...]] = set()  # warnings of earlier fits, which are not shown again


def fit(name: str, classifier: Any, features: Any, labels: np.ndarray) -> Any:
    """Fit the classifier, and return it. Messages call it `name`."""
    with report_early_stop(name, features.shape[1]):
        classifier.fit(features, labels)
    return classifier


@contextmanager
def report_early_stop(name: str, n_features: int) -> Iterator[None]:
    """Print one line if the classifier `name` stops before it has converged.

    The line replaces scikit-learn's warnings about it. Each other warning is shown once.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        yield
    if any(issubclass(w.category, ConvergenceWarning) for w in caught):
        print(f"{name} on {n_features:,} features stopped before it converged", flush=True)
    for w in caught:
        about = (w.category, str(w.message), w.filename, w.lineno)
        if not issubclass(w.category, ConvergenceWarning) and about not in _shown_warnings:
            _shown_warnings.add(about)
            warnings.warn_explicit(w.message, w.category, w.filename, w.lineno, source=w.source)


def _read(file: Path | None) -> dict[str, np.ndarray]:
    """Read the arrays of the file by key. The result is empty if the file is missing or damaged."""
    if file is None or not file.exists():
        return {}
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return dict(arrays)
    except (OSError, ValueError, EOFError, BadZipFile, zlib.error):
        return {}
