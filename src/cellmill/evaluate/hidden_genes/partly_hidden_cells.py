"""Cells with genes that are hidden from the model.

A hidden gene is treated as one that was not measured. Its counts are removed before anything is
computed from a cell. A model whose tokens include zeros (`tokens.zero_frac`) gets no zero for it.

Legend: C cells, V genes of the vocabulary, G hidden genes, H hidden width.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
import scipy.sparse as sp
import torch

from cellmill.config.parts.tokens import SPECIAL, Tokens
from cellmill.data.arrays import log_normalise, select_columns
from cellmill.data.genes.names import GeneColumns
from cellmill.data.genes.vocabulary import Vocabulary
from cellmill.data.stream.batch import Batch
from cellmill.evaluate.features.cell_features import TOKEN_BUDGET, keep_columns
from cellmill.evaluate.hidden_genes.ridge import GeneRidge
from cellmill.evaluate.inference.embed import embed_batches, tokenize_blocks
from cellmill.evaluate.task import Context
from cellmill.models.family import Model


@dataclass(frozen=True)
class PartlyHiddenCells:
    """Counts of some cells, and the genes that are hidden in all of them from a model."""

    network: Any  # the model; which parts it has depends on its family and objective
    vocabulary: Vocabulary
    token_options: Tokens
    precision: str
    gene_columns: GeneColumns  # columns of `counts` as rows of the vocabulary
    counts: sp.csr_matrix  # (C, columns of the file), with the hidden genes
    hidden_genes: np.ndarray  # (G,) int64: rows of the vocabulary, ascending
    levels: np.ndarray | None  # (C, obs columns): level codes that the model reads, if any

    @classmethod
    def from_context(
        cls,
        context: Context,
        cells: np.ndarray,
        counts: sp.csr_matrix,
        hidden_genes: np.ndarray,
    ) -> Self:
        """Hide genes of `cells` (indices) with these `counts` from the evaluated model."""
        model = context.model
        return cls(
            model.network,
            model.vocabulary,
            model.tokens,
            context.options.precision,
            context.gene_columns,
            counts,
            hidden_genes,
            context.levels[cells],
        )

    @cached_property
    def visible_and_hidden_genes(self) -> np.ndarray:
        """Rows of the genes that have a column or are hidden, ascending; int64."""
        target = self.gene_columns.target
        return np.union1d(target[target >= 0], self.hidden_genes)

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self.network.parameters()).device

    @cached_property
    def visible_file_counts(self) -> sp.csr_matrix:
        """(C, columns of the file): counts of the visible genes."""
        is_hidden = np.isin(self.gene_columns.target, self.hidden_genes)
        return keep_columns(self.counts, ~is_hidden)

    @cached_property
    def visible_counts(self) -> sp.csr_matrix:
        """(C, V): counts of the visible genes that the model knows."""
        return self._select_known(self.visible_file_counts)

    @cached_property
    def visible_profiles(self) -> sp.csr_matrix:
        """(C, V) float32: log(1 + counts per 10,000) of the visible genes that the model knows."""
        return log_normalise(self.visible_counts)

    @cached_property
    def hidden_expression(self) -> np.ndarray:
        """(C, G) float32: log(1 + counts per 10,000) of the hidden genes, where 10,000 is the sum
        over all genes that the model knows.
        """
        profiles = log_normalise(self._select_known(self.counts))
        return np.asarray(profiles[:, self.hidden_genes].toarray())

    def _select_known(self, counts: sp.csr_matrix) -> sp.csr_matrix:
        """(C, V): counts (C, columns of the file) of the genes that the model knows."""
        return select_columns(counts, self.gene_columns.target, self.vocabulary.n_genes)

    def tokenize(self) -> Iterator[Batch]:
        """Tokens of the visible genes; cells without any are left out."""
        for batch in tokenize_blocks(
            [self.visible_file_counts],
            self.gene_columns,
            self.vocabulary,
            self.token_options,
            per_cell={"levels": self.levels},
        ):
            # removed counts are zeros, which may have tokens too
            is_visible = ~np.isin(batch.token_ids, self.hidden_genes + len(SPECIAL))
            yield _keep_tokens(batch, is_visible)

    def embed(self, network: Model) -> np.ndarray:
        """(C, H) float32: vectors of the visible part of each cell; zeros for a cell without any."""
        n_cells = self.counts.shape[0]
        vectors = embed_batches(self.tokenize(), network, n_cells, TOKEN_BUDGET, self.precision)
        return np.nan_to_num(vectors)

    def predict_by_ridge(
        self, ridge: GeneRidge, noises: Iterable[float] = (1.0,)
    ) -> list[np.ndarray]:
        """(C, G) float32: expression of the hidden genes, from the visible ones, for each of `noises`,
        in units of the noise of the regression.
        """
        visible_genes = np.setdiff1d(self.visible_and_hidden_genes, self.hidden_genes)
        return ridge.predict(self.visible_counts, visible_genes, self.hidden_genes, noises)


def _keep_tokens(batch: Batch, is_kept: np.ndarray) -> Batch:
    """The batch with these tokens only, and the cells that have any."""
    # (cells + 1,): bounds of each cell among the tokens that are kept
    n_before = np.concatenate([[0], np.cumsum(is_kept)])
    bounds = n_before[batch.cu_seqlens].astype(np.int32)
    has_tokens = np.diff(bounds) > 0
    masks = {"token": is_kept, "cell": has_tokens}
    return batch.map(
        lambda axis, array: array[masks[axis.name]],
        cu_seqlens=bounds[np.concatenate([[True], has_tokens])],
    )
