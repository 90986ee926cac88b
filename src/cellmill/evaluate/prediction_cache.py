"""Cache of baseline predictions, principal components and clusters, shared by all evaluations of a dataset.

A prediction is keyed by a SHA-256 of its classifier, the features and labels of the fitted cells, the
features of the tested cells, and `describe_algorithms`. Whoever changes an algorithm without changing
a constant must delete the caches. Each dataset has one .npz file; its arrays are never pickled.
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
MAX_BYTES = 2**20  # largest array of features that is kept: each evaluation reads the whole file


def describe_algorithms() -> str:
    """Part of each key: versions of packages, and all numbers that are constants of ALGORITHMS."""
    constants = [
        f"{module.__name__}.{name}={value!r}"
        for module in ALGORITHMS
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, int | float)
    ]
    return ", ".join([VERSIONS, *constants])


class KnownPredictions(dict[str, np.ndarray]):
    """Predictions by key, which count how often those of earlier evaluations are read."""

    def __init__(self, stored: Mapping[str, np.ndarray]) -> None:
        super().__init__(stored)
        self.stored_keys = frozenset(stored)  # of earlier evaluations
        self.n_stored_reads = 0

    def __getitem__(self, key: str) -> np.ndarray:
        self.n_stored_reads += key in self.stored_keys
        return super().__getitem__(key)


class PredictionCache:
    """Known predictions by key. `save` writes them to the .npz file `file`; without one, they last only
    as long as this process.
    """

    def __init__(self, file: Path | None = None) -> None:
        self.file = file
        self.predictions = KnownPredictions(_read(file))
        # from features that no other run has, or by classifiers of other packages
        self.unsaved_predictions: dict[str, np.ndarray] = {}

    def get_or_compute(
        self, about: str, values: Any, compute: Callable[[], np.ndarray]
    ) -> np.ndarray:
        """Result of `compute`, which is called unless its result is known.

        The key is made from `values`, dense or sparse, and the text `about`, which must say all else that
        the result depends on. A new result is kept if it has at most MAX_BYTES.
        """
        key = digest_arrays(f"{about} of {describe_algorithms()}", values)
        result = self.predictions[key] if key in self.predictions else compute()
        if result.nbytes <= MAX_BYTES:
            self.predictions[key] = result
        return result

    def save(self) -> None:
        """Write the file again if there are new predictions.

        If two evaluations save at the same time, one may lose its new predictions.
        """
        if self.file is not None and self.predictions.keys() > self.predictions.stored_keys:
            arrays: dict[str, Any] = _read(self.file) | self.predictions
            with atomic_path(self.file) as temporary:
                np.savez_compressed(temporary, **arrays)


class CachedClassifiers:
    """Classifiers by name, each fitted on `features`, `(cells, width)`, and `labels`, `(cells,)`, when
    it is first asked for a prediction that is not known.

    `known` has the predictions by key of each classifier; new ones are added to it.
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
        """Key of the predictions of every classifier on `features`."""
        digest = digest_arrays(self._digest, features)
        return {
            name: digest_arrays(f"{name}: {classifier!r} on {digest}")
            for name, classifier in self._classifiers.items()
        }

    def predict(self, features: Any) -> dict[str, np.ndarray]:
        """Predicted classes, text `(cells,)`, by every classifier."""
        predicted = {}
        for name, key in self.keys(features).items():
            known = self._known[name]
            if key not in known:
                known[key] = self._classes[self._get_fitted(name).predict(features)]
            predicted[name] = known[key]
        return predicted


_passed_on: set[tuple[Any, ...]] = set()  # warnings of earlier fits, which are not repeated


def fit(name: str, classifier: Any, features: Any, labels: np.ndarray) -> Any:
    """Fit the classifier and return it. `name` is for messages."""
    with report_early_stop(name, features.shape[1]):
        classifier.fit(features, labels)
    return classifier


@contextmanager
def report_early_stop(name: str, n_features: int) -> Iterator[None]:
    """Say in one line that the classifier `name` stopped before it converged. Other warnings are
    passed on.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        yield
    if any(issubclass(w.category, ConvergenceWarning) for w in caught):
        print(f"{name} on {n_features:,} features stopped before it converged", flush=True)
    for w in caught:
        about = (w.category, str(w.message), w.filename, w.lineno)
        if not issubclass(w.category, ConvergenceWarning) and about not in _passed_on:
            _passed_on.add(about)
            warnings.warn_explicit(w.message, w.category, w.filename, w.lineno, source=w.source)


def _read(file: Path | None) -> dict[str, np.ndarray]:
    """Arrays of the file by key; empty without a file, or if it is damaged."""
    if file is None or not file.exists():
        return {}
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return dict(arrays)
    except (OSError, ValueError, EOFError, BadZipFile, zlib.error):
        return {}
