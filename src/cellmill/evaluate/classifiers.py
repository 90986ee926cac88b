"""Classifiers of labels, and the features of cells that every baseline is made of."""

import warnings
from typing import Any

import numpy as np
import scipy.sparse as sp
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from cellmill.data.count_matrix import counts_per_10k
from cellmill.data.counts_reader import CountsReader

ROW_BLOCK = 4096  # cells read at once


def classifiers(neighbors: int, n_train: int) -> dict[str, Any]:
    """Unfitted classifiers of dense features, by name; a new one is one line here."""
    return {"logistic regression": logistic(), "kNN": KNeighborsClassifier(min(neighbors, n_train))}


def logistic(with_mean: bool = True) -> Any:
    return make_pipeline(StandardScaler(with_mean=with_mean), LogisticRegression(max_iter=1000))


def fit(classifier: Any, features: Any, labels: np.ndarray) -> bool:
    """Fit; returns whether it converged."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        classifier.fit(features, labels)
    return not any(issubclass(w.category, ConvergenceWarning) for w in caught)


def log_normalise(counts: sp.csr_matrix) -> sp.csr_matrix:
    """log(1 + counts per 10,000 of the cell), float32; a cell without counts stays zero."""
    values = np.log1p(counts_per_10k(counts.data, counts.indptr)).astype(np.float32)
    return sp.csr_matrix((values, counts.indices, counts.indptr), shape=counts.shape)


def read_rows(reader: CountsReader, mask: np.ndarray) -> sp.csr_matrix:
    """Counts of the cells where `mask` (bool, `(n_obs,)`) is True."""
    blocks, first = [], 0
    for block in reader.rows(ROW_BLOCK):
        blocks.append(block[np.flatnonzero(mask[first : first + block.shape[0]])])
        first += block.shape[0]
    return sp.vstack(blocks, format="csr")
