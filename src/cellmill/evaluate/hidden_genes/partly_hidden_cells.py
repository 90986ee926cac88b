"""Cells with genes that are hidden from the model.

A hidden gene is treated like a gene that was not measured. The counts of hidden genes are removed before
anything is computed from a cell. Some models have tokens of zeros (`tokens.zero_frac`), but a hidden gene
has no such token.

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
    """Counts of some cells, and genes that are hidden from a model in all of these cells."""

    network: Any  # the model; untyped, because its heads depend on its family and objective
    vocabulary: Vocabulary
    token_options: Tokens
    precision: str  # number format of the model's passes
    gene_columns: GeneColumns  # says which row of the vocabulary each column of `counts` is
    counts: sp.csr_matrix  # (C, columns of the file), hidden genes included
    hidden_genes: np.ndarray  # (G,) int64: rows of the vocabulary, ascending
    levels: np.ndarray | None  # (C, obs columns): level codes that the model reads, if any
    token_budget: int = (
        TOKEN_BUDGET  # at most this many visible tokens in a pass; changes only rounding
    )

    @classmethod
    def from_context(
        cls,
        context: Context,
        cells: np.ndarray,
        counts: sp.csr_matrix,
        hidden_genes: np.ndarray,
    ) -> Self:
        """Hide genes from the evaluated model. The `cells` (indices) have these `counts`."""
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
        """Rows of the vocabulary's genes that have a column or are hidden, (genes,) int64, ascending."""
        target = self.gene_columns.target
        return np.union1d(target[target >= 0], self.hidden_genes)

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self.network.parameters()).device

    @cached_property
    def visible_file_counts(self) -> sp.csr_matrix:
        """Counts of the visible genes, (C, columns of the file); columns of hidden genes have 0."""
        is_hidden = np.isin(self.gene_columns.target, self.hidden_genes)
        return keep_columns(self.counts, ~is_hidden)

    @cached_property
    def visible_counts(self) -> sp.csr_matrix:
        """Counts of the visible genes that the model knows, (C, V)."""
        return self._select_known(self.visible_file_counts)

    @cached_property
    def visible_profiles(self) -> sp.csr_matrix:
        """log(1 + counts per 10,000) of the visible genes that the model knows, (C, V) float32."""
        return log_normalise(self.visible_counts)

    @cached_property
    def hidden_expression(self) -> np.ndarray:
        """True expression of the hidden genes, (C, G) float32: log(1 + counts per 10,000).

        The 10,000 are the sum over all genes that the model knows.
        """
        profiles = log_normalise(self._select_known(self.counts))
        return np.asarray(profiles[:, self.hidden_genes].toarray())

    def _select_known(self, counts: sp.csr_matrix) -> sp.csr_matrix:
        """Take the genes that the model knows from `counts`, (C, columns of the file): (C, V)."""
        return select_columns(counts, self.gene_columns.target, self.vocabulary.n_genes)

    def tokenize(self) -> Iterator[Batch]:
        """Yield the tokens of the visible genes. A cell without such a token is left out."""
        for batch in tokenize_blocks(
            [self.visible_file_counts],
            self.gene_columns,
            self.vocabulary,
            self.token_options,
            per_cell={"levels": self.levels},
        ):
            # the removed counts are zeros now, and option tokens.zero_frac makes tokens of zeros
            is_visible = ~np.isin(batch.token_ids, self.hidden_genes + len(SPECIAL))
            yield _keep_tokens(batch, is_visible)

    def embed(self, network: Model) -> np.ndarray:
        """Compute the vectors of the visible part of each cell, (C, H) float32.

        A cell without a visible token has zeros.
        """
        n_cells = self.counts.shape[0]
        vectors = embed_batches(
            self.tokenize(), network, n_cells, self.token_budget, self.precision
        )
        return np.nan_to_num(vectors)

    def predict_by_ridge(
        self, ridge: GeneRidge, noises: Iterable[float] = (1.0,)
    ) -> list[np.ndarray]:
        """Predict the expression of the hidden genes from the visible genes by a ridge regression.

        Returns one array, (C, G) float32, for each of `noises`. A noise is a multiple of `ridge.noise`.
        """
        visible_genes = np.setdiff1d(self.visible_and_hidden_genes, self.hidden_genes)
        return ridge.predict(self.visible_counts, visible_genes, self.hidden_genes, noises)


def _keep_tokens(batch: Batch, is_kept: np.ndarray) -> Batch:
    """Return the batch with the kept tokens only. A cell without a kept token is left out."""
    # (cells + 1,): where each cell begins and ends among the kept tokens
    n_before = np.concatenate([[0], np.cumsum(is_kept)])
    bounds = n_before[batch.cu_seqlens].astype(np.int32)
    has_tokens = np.diff(bounds) > 0
    masks = {"token": is_kept, "cell": has_tokens}
    return batch.map(
        lambda axis, array: array[masks[axis.name]],
        cu_seqlens=bounds[np.concatenate([[True], has_tokens])],
    )
