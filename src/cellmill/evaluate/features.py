"""Features of cells made from their counts alone (the embedding and the baselines), and classifiers of labels on them.

The classifiers are the same for every kind of features. Logistic regression is multinomial with an L2 penalty (C = 1)
and runs on both standardised and unchanged features: standardising raises the weight of small principal components,
which helps or hurts depending on the number of cells. Newton-CG converges to the accuracies that L-BFGS reaches at a
tolerance of 1e-6, in a tenth of the time.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import scipy.sparse as sp
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from cellmill.data.arrays import log_normalise, select_columns, summed
from cellmill.data.genes.names import match_columns
from cellmill.data.inputs.reader import CountsReader
from cellmill.evaluate.baselines import BaselineCache, CachedClassifier
from cellmill.evaluate.embed import embed_batches, tokens_of
from cellmill.evaluate.scores import EMBEDDING, EXTERNAL, UNTRAINED
from cellmill.evaluate.task import COMPONENTS, TOKEN_BUDGET, Context
from cellmill.models.family import Model

ALL_GENES = "all genes"
OF_SCORED = f"PCA{COMPONENTS} of the scored cells"


def with_external(features: dict[str, Any], context: Context, cells: np.ndarray) -> dict[str, Any]:
    """The features, with the embeddings of `cells` (indices) by models of other packages."""
    return features | {f"{EXTERNAL}{name}": vectors[cells] for name, vectors in context.external.items()}


class Features:
    """Features of cells of one dataset, made from their counts alone."""

    def __init__(self, context: Context) -> None:
        self.model, self.precision = context.model, context.options.precision
        self.columns = match_columns(context.reader, self.model.vocabulary)

    def of(self, counts: sp.csr_matrix, embedding: np.ndarray | None = None) -> dict[str, Any]:
        """Features by name, `(cells, width)`; only those of all genes are sparse. A known `embedding` is taken."""
        profiles = summed(counts) if self.columns.ordered else counts
        known = log_normalise(select_columns(profiles, self.columns.target, self.model.vocabulary.n_genes))
        return {
            EMBEDDING: self._embedded(counts, self.model.network) if embedding is None else embedding,
            UNTRAINED: self.untrained(counts),
            f"PCA{COMPONENTS} of the training cells": self.model.components.transform(known),
            ALL_GENES: log_normalise(profiles),
        }

    def untrained(self, counts: sp.csr_matrix) -> np.ndarray:
        """Vectors by the same architecture with initial weights, `(cells, hidden)` float32."""
        return self._embedded(counts, self.model.untrained)

    def _embedded(self, counts: sp.csr_matrix, network: Model) -> np.ndarray:
        """Vectors; zeros for cells without a known gene."""
        every, totals = np.ones(counts.shape[0], bool), np.zeros(2, np.int64)
        model = self.model
        batches = tokens_of([counts], self.columns, model.vocabulary, model.tokens, every, totals)
        return np.nan_to_num(embed_batches(batches, network, counts.shape[0], TOKEN_BUDGET, self.precision))


def with_components(features: dict[str, Any]) -> dict[str, Any]:
    """The features, with principal components of all genes of these cells, of log counts and of scaled ones."""
    scaled = StandardScaler(with_mean=False).fit_transform(features[ALL_GENES])
    made = {OF_SCORED: own_components(features[ALL_GENES]), f"{OF_SCORED}, scaled genes": own_components(scaled)}
    return {**{kind: of for kind, of in features.items() if kind != ALL_GENES}, **made, ALL_GENES: features[ALL_GENES]}


def own_components(profiles: sp.csr_matrix) -> np.ndarray:
    """Principal components fitted on the cells themselves, `(cells, components)`."""
    n = max(1, min(COMPONENTS, *(size - 1 for size in profiles.shape)))
    return np.asarray(PCA(n, svd_solver="arpack", random_state=0).fit_transform(profiles))


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
