"""Features of cells made from their counts alone: the embedding, and what a baseline is made of."""

from typing import Any

import numpy as np
import scipy.sparse as sp
from sklearn.decomposition import PCA
from sklearn.preprocessing import StandardScaler

from cellmill.data.count_matrix import log_normalise, select_columns, summed
from cellmill.data.genes import match_columns
from cellmill.evaluate.embed import embed_batches, tokens_of
from cellmill.evaluate.score_table import EMBEDDING, EXTERNAL, UNTRAINED
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
