"""Cells with some genes hidden from the model: their counts, tokens and embeddings.

A hidden gene is as one that was not measured. Its counts are taken away before anything is made of a cell, so that
neither a value nor the library size tells of them; nor does a model whose tokens have zeros (`tokens.zero_frac`) see
that it is one.

Legend: C cells, F columns of the file, V genes of the vocabulary, M of them measured, G hidden.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import scipy.sparse as sp

from cellmill.config.tokens import SPECIAL
from cellmill.data.count_matrix import log_normalise, select_columns
from cellmill.data.genes import match_columns
from cellmill.data.tokens import Batch
from cellmill.evaluate.embed import embed_batches, tokens_of
from cellmill.evaluate.task import TOKEN_BUDGET, Context
from cellmill.models.family import Model


@dataclass(frozen=True)
class HiddenGenes:
    """Counts of some cells, and the genes that are hidden in all of them."""

    context: Context
    counts: sp.csr_matrix  # (C, F)
    genes: np.ndarray  # (G,) int64: rows of the vocabulary, ascending

    @cached_property
    def measured(self) -> np.ndarray:
        """(M,) int64: rows of the vocabulary that the file has, ascending."""
        return measured_genes(self.context)

    @cached_property
    def visible(self) -> sp.csr_matrix:
        """(C, F): the counts without those of hidden genes."""
        target = match_columns(self.context.reader, self.context.model.vocabulary).target
        kept = ~np.isin(target, self.genes)
        few = self.counts.copy()
        few.data = few.data * kept[few.indices].astype(few.dtype)
        few.eliminate_zeros()
        return few

    def expression(self) -> np.ndarray:
        """(C, G) float32: log(1 + counts per 10,000) of the hidden genes, of all counts of the model's genes."""
        return np.asarray(log_normalise(self._of_vocabulary(self.counts))[:, self.genes].toarray())

    def visible_counts(self) -> sp.csr_matrix:
        """(C, V): counts of the genes that are seen."""
        return self._of_vocabulary(self.visible)

    def tokens(self) -> Iterator[Batch]:
        """Tokens of the visible genes; cells without any are left out."""
        model, every = self.context.model, np.ones(self.counts.shape[0], bool)
        columns, totals = match_columns(self.context.reader, model.vocabulary), np.zeros(2, np.int64)
        for batch in tokens_of([self.visible], columns, model.vocabulary, model.tokens, every, totals):
            yield without(batch, self.genes + len(SPECIAL))

    def embedded(self, network: Model) -> np.ndarray:
        """(C, H) float32: vectors of the visible part of each cell; zeros for one without any."""
        n_cells, precision = self.counts.shape[0], self.context.options.precision
        return np.nan_to_num(embed_batches(self.tokens(), network, n_cells, TOKEN_BUDGET, precision))

    def _of_vocabulary(self, counts: sp.csr_matrix) -> sp.csr_matrix:
        model = self.context.model
        target = match_columns(self.context.reader, model.vocabulary).target
        return select_columns(counts, target, model.vocabulary.n_genes)


def measured_genes(context: Context) -> np.ndarray:
    """(M,) int64: rows of the model's vocabulary that the dataset has, ascending."""
    target = match_columns(context.reader, context.model.vocabulary).target
    return np.unique(target[target >= 0]).astype(np.int64)


def without(batch: Batch, tokens: np.ndarray) -> Batch:
    """Leave out tokens of these ids; cells may become empty."""
    kept = ~np.isin(batch.genes, tokens)
    if kept.all():
        return batch
    ends = np.concatenate([[0], np.cumsum(kept)])[batch.cu_seqlens].astype(np.int32)
    filled = np.diff(ends) > 0
    counts = None if batch.counts is None else batch.counts[kept]
    levels = None if batch.levels is None else batch.levels[filled]
    numbers = None if batch.numbers is None else batch.numbers[filled]
    ends = np.concatenate([ends[:1], ends[1:][filled]])
    return Batch(batch.genes[kept], batch.values[kept], ends, batch.cells[filled], counts, levels, numbers)
