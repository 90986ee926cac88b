"""Features of cells made from their counts alone: the embedding, and what a baseline is made of."""

from typing import Any

import numpy as np
import scipy.sparse as sp

from cellmill.data.count_matrix import log_normalise, select_columns, summed
from cellmill.data.genes import match_columns
from cellmill.evaluate.embed import embed_batches, tokens_of
from cellmill.evaluate.score_table import EMBEDDING, UNTRAINED
from cellmill.evaluate.task import COMPONENTS, TOKEN_BUDGET, Context
from cellmill.models.family import Model

ALL_GENES = "all genes"


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
            UNTRAINED: self._embedded(counts, self.model.untrained),
            f"PCA{COMPONENTS} of the training cells": self.model.components.transform(known),
            ALL_GENES: log_normalise(profiles),
        }

    def _embedded(self, counts: sp.csr_matrix, network: Model) -> np.ndarray:
        """Vectors; zeros for cells without a known gene."""
        every, totals = np.ones(counts.shape[0], bool), np.zeros(2, np.int64)
        model = self.model
        batches = tokens_of([counts], self.columns, model.vocabulary, model.tokens, every, totals)
        return np.nan_to_num(embed_batches(batches, network, counts.shape[0], TOKEN_BUDGET, self.precision))
