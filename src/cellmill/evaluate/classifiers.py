"""Classifiers of labels, the same for every kind of features, and what they read.

Logistic regression is multinomial with an L2 penalty (C = 1), on standardised features and on features as they are:
standardising raises the weight of small principal components, which helps or harms with the number of cells. Newton-CG
converges to the accuracies that L-BFGS has at a tolerance of 1e-6, in a tenth of its time.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import scipy.sparse as sp
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from cellmill.data.counts_reader import CountsReader
from cellmill.evaluate.baseline_cache import BaselineCache, CachedClassifier
from cellmill.evaluate.score_table import EMBEDDING, UNTRAINED

OF_THE_MODEL = (EMBEDDING, UNTRAINED)  # features that no other run has
ROW_BLOCK = 4096  # cells read at once


def classifiers(neighbors: int, sparse: bool) -> dict[str, Any]:
    """Unfitted classifiers by name; a new one is one line here.

    Sparse features stay sparse: without centring the optimum is the same, since the intercept has no penalty.
    """
    return {
        "logistic regression": make_pipeline(StandardScaler(with_mean=not sparse), _logistic()),
        "logistic regression, unscaled": _logistic(),
        "kNN": KNeighborsClassifier(neighbors),
    }


def _logistic() -> Any:
    return LogisticRegression(solver="newton-cg", max_iter=1000)


def fit_all(
    features: Mapping[str, Any], labels: np.ndarray, neighbors: int, baselines: BaselineCache | None = None
) -> dict[str, Any]:
    """Fitted classifiers by `features + classifier`; `features` are `(cells, width)` each, dense or sparse.

    Baselines are fitted when a prediction of theirs is not in `baselines`.
    """
    cache = BaselineCache() if baselines is None else baselines
    fitted: dict[str, Any] = {}
    for kind, values in features.items():
        for name, classifier in classifiers(min(neighbors, len(labels)), sp.issparse(values)).items():
            if kind in OF_THE_MODEL:
                fit(classifier, values, labels)
                fitted[f"{kind} + {name}"] = classifier
            else:
                fitted[f"{kind} + {name}"] = CachedClassifier(cache, classifier, values, labels, fit)
    return fitted


def fit(classifier: Any, features: Any, labels: np.ndarray) -> None:
    """Fit; a regression that stops before it converged says so in one line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        classifier.fit(features, labels)
    if any(issubclass(w.category, ConvergenceWarning) for w in caught):
        print(f"logistic regression on {features.shape[1]:,} features stopped before it converged", flush=True)


def read_rows(reader: CountsReader, mask: np.ndarray) -> sp.csr_matrix:
    """Counts of the cells where `mask` (bool, `(n_obs,)`) is True."""
    blocks, first = [], 0
    for block in reader.rows(ROW_BLOCK):
        blocks.append(block[np.flatnonzero(mask[first : first + block.shape[0]])])
        first += block.shape[0]
    return sp.vstack(blocks, format="csr")
